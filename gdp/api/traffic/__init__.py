"""Plans for engines that serve traffic: many requests that share the machine."""
