"""Stripe prints invoices and takes card payments. It never decides what is owed: that is in our ledger.

Its library is imported by the functions that call it: it loads two HTTP clients, a tenth of the time in which a server
starts, and most servers take no payments (`tests/api/test_serve_cli.py`)."""
