"""Where finished records go: memory and disk. Each sink is given the encoded line and keeps its own troubles."""
