"""Stripe prints invoices and takes card payments. It never decides what is owed: that is in our ledger."""
