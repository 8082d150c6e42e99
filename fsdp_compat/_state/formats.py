"""Where saved files look for what sharded values are made of, see ``sharded_values``."""

from .sharded_values import FlatOfParameters as FlatOfParameters
from .sharded_values import Place as Place
from .sharded_values import _rebuilt as _rebuilt
