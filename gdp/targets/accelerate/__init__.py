"""accelerate: device maps of PyTorch modules, with offloading."""
