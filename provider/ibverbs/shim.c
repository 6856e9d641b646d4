//go:build ibverbs

#include "shim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

// Some functions return -1 and set errno, others return an error number.
static int error_of(int rc)
{
	return rc < 0 ? (errno ? errno : EIO) : rc;
}

// rdma_rxe may queue all and then fail to ring the bell: it names no bad one.
static int64_t posted(int rc, int64_t bad, int n)
{
	return rc && bad >= 0 ? (int64_t)rc << 32 | bad : n;
}

int64_t shim_post_send(struct ibv_qp *qp, const struct shim_send *s, int n, struct ibv_sge *sge)
{
	struct ibv_send_wr wr[SHIM_BATCH], *bad = NULL;

	if (n <= 0 || n > SHIM_BATCH)
		return (int64_t)EINVAL << 32;
	memset(wr, 0, n * sizeof wr[0]);
	for (int i = 0; i < n; i++) {
		wr[i].wr_id = s[i].id;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = sge;
		wr[i].num_sge = s[i].nsge;
		wr[i].opcode = s[i].opcode;
		wr[i].send_flags = s[i].flags;
		wr[i].imm_data = htonl(s[i].imm);
		if (s[i].ah) {
			wr[i].wr.ud.ah = (struct ibv_ah *)(uintptr_t)s[i].ah;
			wr[i].wr.ud.remote_qpn = s[i].qpn;
			wr[i].wr.ud.remote_qkey = s[i].qkey;
		} else {
			wr[i].wr.rdma.remote_addr = s[i].remote_addr;
			wr[i].wr.rdma.rkey = s[i].rkey;
		}
		sge += s[i].nsge;
	}
	int rc = error_of(ibv_post_send(qp, wr, &bad));
	return posted(rc, bad ? bad - wr : -1, n);
}

int64_t shim_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct shim_recv *r, int n, struct ibv_sge *sge)
{
	struct ibv_recv_wr wr[SHIM_BATCH], *bad = NULL;

	if (n <= 0 || n > SHIM_BATCH)
		return (int64_t)EINVAL << 32;
	for (int i = 0; i < n; i++) {
		wr[i] = (struct ibv_recv_wr){ .wr_id = r[i].id, .next = i + 1 < n ? &wr[i + 1] : NULL, .sg_list = sge, .num_sge = r[i].nsge };
		sge += r[i].nsge;
	}
	int rc = error_of(srq ? ibv_post_srq_recv(srq, wr, &bad) : ibv_post_recv(qp, wr, &bad));
	return posted(rc, bad ? bad - wr : -1, n);
}

int shim_poll(struct ibv_cq *cq, int n, struct shim_wc *out)
{
	struct ibv_wc wc[SHIM_BATCH];

	n = ibv_poll_cq(cq, n < SHIM_BATCH ? n : SHIM_BATCH, wc);
	for (int i = 0; i < n; i++) {
		uint32_t imm = wc[i].wc_flags & IBV_WC_WITH_INV ? wc[i].invalidated_rkey : ntohl(wc[i].imm_data);
		out[i] = (struct shim_wc){ wc[i].wr_id, wc[i].status, wc[i].opcode, wc[i].byte_len, imm, wc[i].qp_num, wc[i].src_qp, wc[i].wc_flags };
	}
	return n;
}

int shim_arm(struct ibv_cq *cq)
{
	return error_of(ibv_req_notify_cq(cq, 0));
}

int shim_cq_event(struct ibv_comp_channel *ch)
{
	struct ibv_cq *cq;
	void *context;

	errno = 0;
	if (ibv_get_cq_event(ch, &cq, &context))
		return errno ? errno : EIO;
	ibv_ack_cq_events(cq, 1);
	return 0;
}

int shim_async_event(struct ibv_context *ctx, struct shim_event *out)
{
	struct ibv_async_event ev;

	errno = 0;
	if (ibv_get_async_event(ctx, &ev))
		return errno ? errno : EIO;
	*out = (struct shim_event){ .type = ev.event_type };
	switch (ev.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
		out->qpn = ev.element.qp->qp_num;
		break;
	case IBV_EVENT_CQ_ERR:
		out->cq = ev.element.cq;
		break;
	default:
		break;
	}
	ibv_ack_async_event(&ev);
	return 0;
}

int shim_gids(struct ibv_context *ctx, struct shim_gid *out, int max)
{
	struct ibv_gid_entry *e = calloc(max, sizeof *e);
	ssize_t n = e ? ibv_query_gid_table(ctx, e, max, 0) : -ENOMEM;

	for (int i = 0; i < n; i++) {
		memcpy(out[i].gid, e[i].gid.raw, 16);
		out[i].index = e[i].gid_index;
		out[i].port = e[i].port_num;
		out[i].type = e[i].gid_type;
		out[i].ifindex = e[i].ndev_ifindex;
	}
	free(e);
	return n;
}

int shim_port(struct ibv_context *ctx, int port, struct ibv_port_attr *attr)
{
	return error_of(ibv_query_port(ctx, port, attr));
}

struct ibv_qp *shim_create_qp(struct ibv_pd *pd, int type, struct ibv_cq *send, struct ibv_cq *recv, struct ibv_srq *srq,
			      uint32_t *send_wr, uint32_t *recv_wr, uint32_t send_sge, uint32_t recv_sge)
{
	struct ibv_qp_init_attr a = {
		.send_cq = send, .recv_cq = recv, .srq = srq, .qp_type = type,
		.cap = { .max_send_wr = *send_wr, .max_recv_wr = srq ? 0 : *recv_wr, .max_send_sge = send_sge, .max_recv_sge = srq ? 0 : recv_sge },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &a);

	if (qp) {
		*send_wr = a.cap.max_send_wr;
		*recv_wr = a.cap.max_recv_wr;
	}
	return qp;
}

struct ibv_srq *shim_create_srq(struct ibv_pd *pd, uint32_t *wr, uint32_t sge)
{
	struct ibv_srq_init_attr a = { .attr = { .max_wr = *wr, .max_sge = sge } };
	struct ibv_srq *srq = ibv_create_srq(pd, &a);

	if (srq)
		*wr = a.attr.max_wr;
	return srq;
}

struct ibv_mr *shim_reg_mr(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access)
{
	return ibv_reg_mr(pd, (void *)(uintptr_t)addr, len, access);
}

static struct ibv_ah_attr path_of(const struct shim_path *p)
{
	struct ibv_ah_attr a = {
		.is_global = p->grh, .port_num = p->port, .sl = p->sl, .dlid = p->dlid, .static_rate = p->rate,
		.grh = { .sgid_index = p->sgid_index, .flow_label = p->flow_label, .hop_limit = p->hop_limit, .traffic_class = p->traffic_class },
	};
	memcpy(a.grh.dgid.raw, p->dgid, 16);
	return a;
}

struct ibv_ah *shim_create_ah(struct ibv_pd *pd, const struct shim_path *p)
{
	struct ibv_ah_attr a = path_of(p);

	return ibv_create_ah(pd, &a);
}

int shim_to_init(struct ibv_qp *qp, int port, int pkey_index, uint32_t qkey, int access)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = port, .pkey_index = pkey_index, .qkey = qkey };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	if (qp->qp_type == IBV_QPT_UD) {
		mask |= IBV_QP_QKEY;
	} else {
		a.qp_access_flags = access;
		mask |= IBV_QP_ACCESS_FLAGS;
	}
	return error_of(ibv_modify_qp(qp, &a, mask));
}

int shim_to_rtr(struct ibv_qp *qp, const struct shim_path *p, int mtu, uint32_t dest_qpn, uint32_t rq_psn, int max_dest_rd, int min_rnr)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR };
	int mask = IBV_QP_STATE;

	if (qp->qp_type != IBV_QPT_UD) {
		a.ah_attr = path_of(p);
		a.path_mtu = mtu;
		a.dest_qp_num = dest_qpn;
		a.rq_psn = rq_psn;
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (qp->qp_type == IBV_QPT_RC) {
		a.max_dest_rd_atomic = max_dest_rd;
		a.min_rnr_timer = min_rnr;
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	return error_of(ibv_modify_qp(qp, &a, mask));
}

int shim_to_rts(struct ibv_qp *qp, uint32_t sq_psn, int timeout, int retry, int rnr_retry, int max_rd)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .sq_psn = sq_psn };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (qp->qp_type == IBV_QPT_RC) {
		a.timeout = timeout;
		a.retry_cnt = retry;
		a.rnr_retry = rnr_retry;
		a.max_rd_atomic = max_rd;
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	return error_of(ibv_modify_qp(qp, &a, mask));
}

int shim_to_state(struct ibv_qp *qp, int state)
{
	struct ibv_qp_attr a = { .qp_state = state };

	return error_of(ibv_modify_qp(qp, &a, IBV_QP_STATE));
}

int shim_state(struct ibv_qp *qp)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	int rc = error_of(ibv_query_qp(qp, &a, IBV_QP_STATE, &i));

	return rc ? -rc : (int)a.qp_state;
}
