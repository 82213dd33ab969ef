"""Stripe: the printer of invoices and the taker of cards. Never the meter of record: what is owed is in our ledger."""
