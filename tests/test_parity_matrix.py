from tests.parity_matrix import measure


def test_a_case_of_the_parity_matrix_is_measured(tmp_path):
    row = measure("phi3", "LoRA", "attention", tmp_path, torchtune=None)
    assert row.effect > 0.05
    assert max(row.peft, row.merged, row.back) < 1e-5
