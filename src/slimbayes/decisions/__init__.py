"""From predictions to decisions: temperatures, and when to say nothing.

Each is fitted to a Prediction of held-out rows and their targets, then called with the Prediction of new ones:

    from slimbayes.decisions import Abstention, TemperatureScaling

    held_out = sb.predict(net, x_held_out)
    warm = TemperatureScaling.fit(held_out, y_held_out)(sb.predict(net, x_new))
"""

from slimbayes.decisions.rules import Abstention as Abstention
from slimbayes.decisions.rules import TemperatureScaling as TemperatureScaling
