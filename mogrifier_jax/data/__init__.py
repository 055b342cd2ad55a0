"""From the bytes of a corpus to windows of token ids on the devices."""
