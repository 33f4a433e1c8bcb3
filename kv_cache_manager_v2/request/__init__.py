"""The cache of one request: its pages, its lengths, and the calls that change them."""
