"""What may be asked for, as rules over what is decoded from the wire. Each rule yields problems: the server raises the
first one before it accepts a request, the trainer before it computes, and the client's `validate` lists all.
"""
