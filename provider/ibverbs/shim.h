// What Go asks of libibverbs in one call each, with structures that Go can fill:
// those of libibverbs have unions, and half of its functions are inline.
#ifndef IPOIBCM_SHIM_H
#define IPOIBCM_SHIM_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct shim_send {
	uint64_t id, remote_addr;
	uint64_t ah; // a struct ibv_ah *, 0 but on UD
	uint32_t opcode, flags, imm, rkey, qpn, qkey;
	uint32_t nsge;
};

struct shim_recv {
	uint64_t id;
	uint32_t nsge;
};

struct shim_wc {
	uint64_t id;
	uint32_t status, opcode, len, imm, qpn, src_qpn, flags;
};

struct shim_gid {
	uint8_t gid[16];
	uint32_t index, port, type, ifindex;
};

struct shim_path {
	uint8_t dgid[16];
	uint32_t sgid_index, flow_label, port;
	uint8_t hop_limit, traffic_class, sl;
	uint8_t grh, rate; // rate 0: the port's
	uint16_t dlid;     // InfiniBand
};

struct shim_event {
	int type;
	uint32_t qpn;      // of a QP event
	struct ibv_cq *cq; // of a CQ event
};

// How many work requests one call takes at most.
#define SHIM_BATCH 64

// Each takes n requests whose SG entries follow one another in sge. They return how
// many were posted, and above 32 bits an error number.
int64_t shim_post_send(struct ibv_qp *qp, const struct shim_send *s, int n, struct ibv_sge *sge);
int64_t shim_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct shim_recv *r, int n, struct ibv_sge *sge);
// Returns how many completions there were.
int shim_poll(struct ibv_cq *cq, int n, struct shim_wc *out);
int shim_arm(struct ibv_cq *cq);

// Takes one completion event and acknowledges it; 0 or an error number.
int shim_cq_event(struct ibv_comp_channel *ch);
// Takes one asynchronous event and acknowledges it; 0 or an error number.
int shim_async_event(struct ibv_context *ctx, struct shim_event *ev);

int shim_gids(struct ibv_context *ctx, struct shim_gid *out, int max);
int shim_port(struct ibv_context *ctx, int port, struct ibv_port_attr *attr);
struct ibv_qp *shim_create_qp(struct ibv_pd *pd, int type, struct ibv_cq *send, struct ibv_cq *recv, struct ibv_srq *srq,
			      uint32_t *send_wr, uint32_t *recv_wr, uint32_t send_sge, uint32_t recv_sge);
struct ibv_srq *shim_create_srq(struct ibv_pd *pd, uint32_t *wr, uint32_t sge);
struct ibv_mr *shim_reg_mr(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access);
struct ibv_ah *shim_create_ah(struct ibv_pd *pd, const struct shim_path *p);

// Transitions, with the masks that each transport needs.
int shim_to_init(struct ibv_qp *qp, int port, int pkey_index, uint32_t qkey, int access);
int shim_to_rtr(struct ibv_qp *qp, const struct shim_path *p, int mtu, uint32_t dest_qpn, uint32_t rq_psn, int max_dest_rd, int min_rnr);
int shim_to_rts(struct ibv_qp *qp, uint32_t sq_psn, int timeout, int retry, int rnr_retry, int max_rd);
int shim_to_state(struct ibv_qp *qp, int state);
// The state, or minus an error number.
int shim_state(struct ibv_qp *qp);

#endif
