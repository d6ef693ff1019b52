"""The hosts of a run: the hostfile, facts about hosts, ssh connections, leftover processes."""
