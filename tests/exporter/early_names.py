"""A module that imported attention by its name before anybody listened."""

from torch.nn.functional import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
