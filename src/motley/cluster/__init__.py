"""Who the hosts are: hostfile, what each has, how they are reached, and what is left on them."""
