"""Methods on a link that is really slow: one host a process, shaped by the kernel.

``python -m experiments.links`` measures what methods send and how long a round takes,
and holds both against what was predicted; ``python -m experiments.links.race`` trains
until a loss is reached. Hosts are network namespaces on this machine (Linux, root).
"""
