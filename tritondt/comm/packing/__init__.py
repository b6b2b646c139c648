"""Messages of an exchange: which bytes go to which peer, in which dtype."""
