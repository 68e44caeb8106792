

def test_stored_images_travel_as_their_place(tmp_path: Path) -> None:
    """To the processes of users' environments: a pickle of a problem holds no picture."""
    import pickle

    problem = load_set(toy_set(tmp_path / "set", count=3, split="train"))[1]
    packed = pickle.dumps(problem)
    assert len(packed) < 1000
    assert pickle.loads(packed).images == tuple(problem.images)
