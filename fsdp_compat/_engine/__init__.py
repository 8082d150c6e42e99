"""The runtime that gathers, shows, reduces and frees. It drives stores and knows no layout and no
front end."""
