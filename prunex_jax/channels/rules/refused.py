"""Primitives of jax that have no rule on purpose, with the reason that people are told.

What they touch stays. What is neither here nor in the table of rules is unknown: that
stays too, and a test names it.
"""

import functools
from collections.abc import Mapping

from prunex_jax.channels.context import Rule, freeze_all

_SINGULAR = "may not be finite, or not have a derivative, where channels are removed"
_MESH = "moves values between devices, where channels are not followed"
_DRAWS = "draws by position"
_STATE = "reads or writes a mutable array, which is not followed"
_OUTSIDE = "runs code outside of the program, which cannot be looked into"
_CALL = "calls a program with derivatives or a meaning of its own"
_KERNEL = "is a kernel, which is not looked into"
_SPARSE = "works on sparse arrays, whose positions are numbers"
_TYPES = "makes values of a type or layout that is not followed"
_EXPORT = "belongs to exported programs, which are not looked into"

# Reason -> names of primitives.
_BY_REASON: Mapping[str, str] = {
    _SINGULAR: "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg "
    "householder_product igamma igamma_grad_a igammac lu lu_pivots_to_permutation "
    "ormqr polygamma qr regularized_incomplete_beta schur svd symmetric_product "
    "tridiagonal zeta",
    _MESH: "all_gather all_gather_done all_gather_invariant all_gather_reduced "
    "all_gather_reduced_start all_gather_start all_to_all all_to_all_done "
    "all_to_all_start axis_index global_array_to_host_local_array "
    "host_local_array_to_global_array pbroadcast pbroadcast_done pbroadcast_dynamic "
    "pbroadcast_start ppermute ppermute_done ppermute_start precv preduced psend "
    "psum_done psum_invariant_start psum_start ragged_all_to_all reduce_scatter "
    "reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p "
    "relayout reshard shard_alike shard_map unreduced_pmax unreduced_pmin "
    "unreduced_psum unreduced_psum_start unreduced_reduce_scatter "
    "unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p",
    _DRAWS: "iota_2x32_shape philox2x32 philox4x32 random_clone random_fold_in "
    "random_gamma random_seed random_split random_unwrap random_wrap "
    "rng_bit_generator rng_uniform threefry4x32",
    _STATE: "accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear "
    "empty_ref free_ref freeze get log_extend log_read new_box new_log new_ref pin "
    "run_state swap unpin",
    _OUTSIDE: "buffer_callback debug_callback debug_print ffi_call inspect_sharding "
    "io_callback pure_callback",
    _CALL: "call call_hi_primitive_linearized compute_on "
    "custom_jvp_call_jaxpr custom_lin custom_partitioning custom_vmap_call "
    "fused_call remat_opt stage xla_metadata_call",
    _KERNEL: "core_map cudnn_fusion custom_fusion dot_product_attention_bwd "
    "dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd "
    "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper fusible jaxpr_call mosaic_gpu_p mpmd_map "
    "pallas_call rnn_bwd rnn_fwd scaled_dot scaled_matmul scaled_matmul_wrapper "
    "tpu_custom_call",
    _SPARSE: "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense "
    "bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense "
    "bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense "
    "coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense "
    "csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense",
    _TYPES: "after_all create_token dce_sink empty empty2 from_edtype "
    "layout_constraint program_order tie to_edtype unreachable xla_metadata_value "
    "zeros_like with_memory_space_constraint",
    _EXPORT: "call_exported dim_as_value dimension_size shape_assertion",
    "looks further than one window": "select_and_gather_add select_and_scatter",
    "depends on where it runs": "platform_index",
    "is a check, which jax takes out before it runs": "assert_consumed_value check "
    "consume",
}

REFUSED: Mapping[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.split()
}
# What walks do with them.
REFUSALS: Mapping[str, Rule] = {
    name: functools.partial(freeze_all, text=reason) for name, reason in REFUSED.items()
}
