"""Check the hosts, ports, links and clocks of a launcher's ranks: ``lightning-realloc doctor --cluster``."""
