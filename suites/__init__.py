"""
The cases, one file a chapter of the contract. Imported by nobody; they see an implementation only through its adapter.

    test_a_parity            A  numerical parity with DDP
    test_b_placement         B  init modes and device placement
    test_f_misuse            F  state machine and misuse
    test_g_communication     G  communication schedule and volume
    test_h_delays            H  delays, prefetch: the matrix of init mode, offload, delay, sharding degree
    test_j_accumulation      J  gradient accumulation
    test_l_shared            L  shared (tied) parameters
    test_m_frozen            M  frozen and ignored parameters
    test_n_unused            N  unused parameters and rank-divergent graphs
    test_o_uneven            O  uneven and padded shards
    test_p_nesting           P  nesting and auto-wrap
    test_q_buffers           Q  buffers and batch norm
    test_w_reentry           W  multiple forwards and re-entrancy
    test_x_structures        X  inputs and outputs

    test_ad_cost             AD a component: the cost model of redistributions on a mesh
    test_ae_ranks            AE a component: simulated ranks
"""
