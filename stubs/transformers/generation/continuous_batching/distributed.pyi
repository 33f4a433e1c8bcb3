class DistributedHelper:
    tp_size: int
