"""
Oracles: they read histories and say what does not hold. None of them calls the code that it judges.

    result          CheckResult(check, requirement, findings, count, measurements, notes, inconclusive); `.into(report)`
    references      train_references(workload, regime, *, rank, world_size, device="cpu") -> References (collective)
                        .exact             True: comparisons are bitwise
                        .expected          the history to compare with (the float64 twin)
                        .histories         every reference by name: "float64", "all-reduce", "torch-ddp"
                        .absent            reference name -> why it does not exist for this workload and regime
                        .agree()           raises ReferencesDisagree with the first disagreement
                        .bound(kind, step, fqn) -> Bound
    reference_ddp / reference_all_reduce / reference_single
                    ddp_reference, all_reduce_reference, single_process_reference: (workload, regime, *, rank,
                    world_size, device) -> TrainingHistory; single_process_histories: of all virtual ranks at once
    exactness       assert_exact(workload, regime, world_size) raises NotExact; demands_bitwise(...) -> bool
    parity          all (history, references, *, requirement="R...") -> CheckResult:
                    initial_parity (R001), loss_parity (R001), gradient_parity (R003), parameter_parity (R002),
                    buffer_parity (R130), norm_parity (R101), clipped_gradient_parity (R101), eval_parity (R010),
                    output_parity (R157);
                    parity(history, references, *, requirements={"gradient": "R122"}, none_or_zero=False)
                        -> list[CheckResult]: all that apply; kinds are those of references.Kind;
                    first_divergence(results) -> list[Finding]: by step, then forward < reduce < step < buffers
    partition       sharding_witness(history, plan, *, world_size, padding) -> CheckResult (R188, R033)
    communication   collective_counts (R062-R064), deferred_counts (R065), eval_collectives (R066), no_collectives
                    (R009), frozen_reductions (R072); schedule_digests(history) -> dict for RankReport.digests (R067);
                    and, from modules of their own: wire_volume (volume, R068), groups_used (groups, R069),
                    execution_order and steady_schedule (order, R070, R071), owning_units(workload) (units)
    sizes, traffic  what these stand on: bytes of units, whole and padded; collectives by step, phase and kind
    equality        parameter_digests(history), buffer_digests(history) -> dict for RankReport.digests (R007)
    tolerance       the bounds with their derivations; comparison: one tensor against another
    loop            the training loop of the references; structures: tensors inside nested values
    writer          the collective that last wrote a gradient, recognised by its size
    explain         likely(evidence) -> str | None: the likely cause from the signature of a difference
"""
