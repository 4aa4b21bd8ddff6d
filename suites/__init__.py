"""
The cases, by chapter of the contract. No other package imports them; they see an implementation only through its
adapter.

    test_combinations      every possible pair of features, in few trainings
    test_a_parity          numerical parity with DDP
    test_b_placement       init modes and device placement
    test_c_deferred        deferred initialisation
    test_d_memory          parameter lifecycle and memory
    test_e_full_params     full parameters outside forward and backward
    test_f_misuse          state machine and misuse
    test_g_communication   communication schedule and volume
    test_h_delays          stream safety under delays: init mode x offload x delay x sharding degree
    test_h_overlap         computation during gathers and reductions
    test_h_prefetch        prefetching and asynchronous unshard
    test_h_streams         races between streams on the simulated accelerator
    test_i_precision       mixed precision
    test_j_accumulation    gradient accumulation
    test_k_clipping        gradient clipping
    test_k_scaling         dynamic loss scaling
    test_l_shared          shared (tied) parameters
    test_m_frozen          frozen and ignored parameters
    test_n_unused          unused parameters and rank-divergent graphs
    test_o_uneven          uneven and padded shards
    test_p_nesting         nesting and auto-wrap
    test_q_buffers         buffers and batch norm
    test_r_checkpointing   activation checkpointing
    test_s_offload         parameter offload
    test_t_optimizer_state
                           optimizer state dicts
    test_u_checkpoints     checkpoints that are resumed, on as many ranks or on others
    test_u_sharded_state_dicts
                           sharded state dicts
    test_u_state_dicts     full state dicts, and what reading leaves behind
    test_t_optimizers      optimizers, groups, steps in backward, and what users write
    test_v_hybrid          several groups: hybrid sharding, experts, tensor parallelism
    test_v_pipeline        pipelines of stages that are sharded, with tensor parallelism, too
    test_w_reentry         multiple forwards and re-entrancy
    test_x_structures      inputs and outputs
    test_y_hooks           hooks of users, of the engine, and communication hooks
    test_z_failure         failure and recovery, and interrupted recomputation

The user's own model (--workload), which has a separate profile:

    test_own_model         parity, init modes, offload, precision, accumulation, clipping, checkpoints

Components, which have a separate profile:

    test_aa_buckets        reducer: which gradients share a bucket
    test_aa_reducer        reducer: reduction, unused parameters, layout, hooks, join
    test_ab_bucketing      reduce-scatter bucketing
    test_ac_blocks         chunks: fused chunks and pairs
    test_ac_chunks         chunks: filling, states, round trips, statistics, the pool
    test_ad_cost           mesh: the cost model of redistributions
    test_ad_mesh           mesh: collectives along axes, and a check of metadata
    test_ae_ranks          simulated ranks
"""
