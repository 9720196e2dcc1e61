"""Explanation of routing: the places of a model with their costs, and why other peers cannot serve it."""

from gateway.config.settings import ModelConfig
from gateway.control_types import PlaceView, RouteView
from gateway.remote.peers.fleet import Fleet, RouteCandidate
from gateway.remote.peers.peer import PeerNode
from gateway.remote.peers.placement import PlacementChoice, choose, cost_s, usual_rate


def explain(fleet: Fleet, model: ModelConfig | None, tokens: float) -> RouteView:
    """Explain the choice for an uncached prompt of `tokens` tokens. Without a model, only list the peers."""
    nodes = fleet.nodes.items()
    if model is None:
        places = [PlaceView(name, node.state, ineligibility="" if node.is_up else node.state) for name, node in nodes]
        return RouteView("", "", places)
    candidates = fleet.candidates(model, [], None)
    choice = choose([each.place for each in candidates], tokens) if candidates else None
    usual = usual_rate([each.place for each in candidates])
    places = [_choice(each, choice, cost_s(each.place, tokens, usual)) for each in candidates]
    candidate_names = {each.place.name for each in candidates}
    places += [
        PlaceView(name, node.state, ineligibility=_ineligibility(node, model.name))
        for name, node in nodes
        if name not in candidate_names
    ]
    return RouteView(model.name, "" if choice is None else choice.reason, places)


def _choice(candidate: RouteCandidate, choice: PlacementChoice | None, cost_s: float) -> PlaceView:
    place, peer_model = candidate.place, candidate.peer_model
    return PlaceView(
        place.name,
        "" if peer_model is None else peer_model.state,
        candidate.form,
        round(place.wait_s, 3),
        round(place.load_s, 3),
        round(place.rate, 1),
        round(cost_s, 3),
        is_chosen=choice is not None and choice.place is place,
    )


def _ineligibility(node: PeerNode, name: str) -> str:
    """Return the reason why a peer cannot serve a model."""
    if not node.is_up:
        return node.state
    model = node.model(name)
    if model is None:
        return "does not serve it, or declined it a moment ago"
    return "another form of the model" if model.form else "the form of its model is not known"
