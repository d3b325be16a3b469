"""From predictions to decisions: temperatures, sets and intervals that cover, and when to say nothing.

Each is fitted to a Prediction of held-out rows and their targets, then called with the Prediction of new ones:

    from slimbayes.decisions import Abstention, Conformal, TemperatureScaling

    held_out = sb.predict(net, x_held_out)
    sets = Conformal.fit(held_out, y_held_out, level=0.9)(sb.predict(net, x_new))
"""

from slimbayes.decisions.conformal import Conformal as Conformal
from slimbayes.decisions.conformal import CVPlus as CVPlus
from slimbayes.decisions.rules import Abstention as Abstention
from slimbayes.decisions.rules import TemperatureScaling as TemperatureScaling
