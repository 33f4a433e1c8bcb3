"""What a recorded trace would find in a cache of any size: arithmetic on block ids, without a manager.

Rule: a request touches its blocks from the last to the first. So a block is never older than one that follows it, and LRU order
never evicts a block before those that follow it.
"""
