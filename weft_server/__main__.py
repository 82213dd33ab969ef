"""`python -m weft_server` is `weftd`."""

from weft_server import main

main()
