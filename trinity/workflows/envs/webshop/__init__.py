"""WebShop: buying what was asked for, in a shop of text."""
