"""The KV cache: its blocks, what of them is shared, and whose weights computed them."""
