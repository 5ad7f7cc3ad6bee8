"""torch.distributed.pipelining: split points of PyTorch modules."""
