"""The engine: unshards, shows, reduces and reshards parameters. It uses stores through a protocol,
and knows no layout and no front end."""
