// peer does verbs on rxe0 as it is told: one command per line of standard
// input, one line of answer each, "ok ..." or "error ...". Numbers are as C
// reads them, GIDs are 32 hexadecimal digits, lengths and offsets are octets of
// the one buffer.
//
//   qp TRANSPORT GIDINDEX MTU SRQ BUFLEN   rc, uc or ud; makes everything, to INIT
//   connect GID QPN PSN TIMEOUT RETRY RNRRETRY MINRNR   to RTS (ud: no arguments)
//   fill OFF LEN SEED | check OFF LEN SEED
//   recv ID OFF LEN
//   send ID OFF LEN | sendimm .. IMM | sendinv .. RKEY
//   write ID OFF LEN ADDR RKEY | writeimm .. IMM | read ID OFF LEN ADDR RKEY
//   ah GID | udsend ID OFF LEN QPN QKEY [IMM]
//   window OFF LEN        bind a memory window of type 2 for remote access
//   attach GID            join a multicast group, as a RoCE device needs it
//   poll MS               the next completion, or "ok none"
//   state                 of the QP
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define DEPTH 512
#define QKEY 0x0b1b

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static uint8_t *buf;
static size_t buflen;
static enum ibv_mtu mtu;
static int gididx;

static char *arg[12];
static int nargs;

static unsigned long long num(int i)
{
	return i < nargs ? strtoull(arg[i], NULL, 0) : 0;
}

static int fail(const char *what, int err)
{
	printf("error %s: %s\n", what, strerror(err));
	return -1;
}

static int gid(const char *s, union ibv_gid *g)
{
	for (int i = 0; i < 16; i++) {
		unsigned v;
		if (sscanf(s + 2 * i, "%2x", &v) != 1)
			return fail("GID", EINVAL);
		g->raw[i] = v;
	}
	return 0;
}

// What octet i of a message with this seed holds; the host computes the same.
static uint8_t pattern(uint32_t seed, uint32_t i)
{
	uint32_t x = seed * 2654435761u + i * 40503u;
	return x >> 13 ^ x >> 5;
}

static int make_qp(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	if (!list || !n)
		return fail("no device", ENODEV);
	if (!(ctx = ibv_open_device(list[0])))
		return fail("open", errno);
	gididx = num(2);
	for (mtu = IBV_MTU_256; mtu < IBV_MTU_4096 && 128 << mtu < num(3); mtu++)
		;
	buflen = num(5);
	buf = aligned_alloc(4096, (buflen + 4095) & ~4095ul);
	memset(buf, 0, buflen);
	if (!(pd = ibv_alloc_pd(ctx)))
		return fail("PD", errno);
	mr = ibv_reg_mr(pd, buf, buflen, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
	if (!mr)
		return fail("MR", errno);
	if (!(cq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0)))
		return fail("CQ", errno);
	if (num(4)) {
		struct ibv_srq_init_attr s = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
		if (!(srq = ibv_create_srq(pd, &s)))
			return fail("SRQ", errno);
	}
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = srq ? 0 : DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = !strcmp(arg[1], "rc") ? IBV_QPT_RC : !strcmp(arg[1], "uc") ? IBV_QPT_UC : IBV_QPT_UD,
	};
	if (!(qp = ibv_create_qp(pd, &init)))
		return fail("QP", errno);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	if (qp->qp_type == IBV_QPT_UD) {
		a.qkey = QKEY;
		mask |= IBV_QP_QKEY;
	} else {
		a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (qp->qp_type == IBV_QPT_RC ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND : 0);
		mask |= IBV_QP_ACCESS_FLAGS;
	}
	int rc = ibv_modify_qp(qp, &a, mask);
	if (rc)
		return fail("to INIT", rc);
	union ibv_gid g;
	if (ibv_query_gid(ctx, 1, gididx, &g))
		return fail("query GID", errno);
	printf("ok qpn=0x%x rkey=0x%x addr=0x%llx gid=", qp->qp_num, mr->rkey, (unsigned long long)(uintptr_t)buf);
	for (int i = 0; i < 16; i++)
		printf("%02x", g.raw[i]);
	printf("\n");
	return 0;
}

static int connect_qp(void)
{
	int rc;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR };
	int ud = qp->qp_type == IBV_QPT_UD, reliable = qp->qp_type == IBV_QPT_RC;
	int mask = IBV_QP_STATE;
	if (!ud) {
		a.path_mtu = mtu;
		a.dest_qp_num = num(2);
		a.rq_psn = num(3);
		a.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .sgid_index = gididx, .hop_limit = 64 } };
		if (gid(arg[1], &a.ah_attr.grh.dgid))
			return -1;
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (reliable) {
		a.max_dest_rd_atomic = 16;
		a.min_rnr_timer = num(7);
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	if ((rc = ibv_modify_qp(qp, &a, mask)))
		return fail("to RTR", rc);
	a.qp_state = IBV_QPS_RTS;
	a.sq_psn = ud ? 0 : num(3);
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (reliable) {
		a.timeout = num(4);
		a.retry_cnt = num(5);
		a.rnr_retry = num(6);
		a.max_rd_atomic = 16;
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	if ((rc = ibv_modify_qp(qp, &a, mask)))
		return fail("to RTS", rc);
	printf("ok\n");
	return 0;
}

static int inside(unsigned long long off, unsigned long long len)
{
	return off <= buflen && len <= buflen - off;
}

static int post_recv(void)
{
	if (!inside(num(2), num(3)))
		return fail("range", EINVAL);
	struct ibv_sge s = { (uintptr_t)buf + num(2), num(3), mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = num(1), .sg_list = &s, .num_sge = 1 }, *bad;
	int rc = srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);
	if (rc)
		return fail("post receive", rc);
	printf("ok\n");
	return 0;
}

static int post_send(void)
{
	if (!inside(num(2), num(3)))
		return fail("range", EINVAL);
	struct ibv_sge s = { (uintptr_t)buf + num(2), num(3), mr->lkey };
	struct ibv_send_wr wr = { .wr_id = num(1), .sg_list = &s, .num_sge = num(3) > 0 }, *bad;
	const char *op = arg[0];
	if (!strcmp(op, "send")) {
		wr.opcode = IBV_WR_SEND;
	} else if (!strcmp(op, "sendimm")) {
		wr.opcode = IBV_WR_SEND_WITH_IMM;
		wr.imm_data = htonl(num(4));
	} else if (!strcmp(op, "sendinv")) {
		wr.opcode = IBV_WR_SEND_WITH_INV;
		wr.invalidate_rkey = num(4);
	} else if (!strcmp(op, "udsend")) {
		wr.opcode = nargs > 6 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
		wr.imm_data = htonl(num(6));
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = num(4);
		wr.wr.ud.remote_qkey = num(5);
	} else {
		wr.opcode = !strcmp(op, "read") ? IBV_WR_RDMA_READ : nargs > 6 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = num(4);
		wr.wr.rdma.rkey = num(5);
		wr.imm_data = htonl(num(6));
	}
	int rc = ibv_post_send(qp, &wr, &bad);
	if (rc)
		return fail("post send", rc);
	printf("ok\n");
	return 0;
}

static int window(void)
{
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (!mw)
		return fail("memory window", errno);
	struct ibv_send_wr wr = { .wr_id = 0xb1d, .opcode = IBV_WR_BIND_MW }, *bad;
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		mr, (uintptr_t)buf + num(1), num(2), IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	int rc = ibv_post_send(qp, &wr, &bad);
	if (rc)
		return fail("bind", rc);
	struct ibv_wc wc;
	while (!(rc = ibv_poll_cq(cq, 1, &wc)))
		usleep(100);
	if (rc < 0 || wc.wr_id != 0xb1d || wc.status)
		return fail("bind: completion", EIO);
	printf("ok rkey=0x%x\n", wr.bind_mw.rkey);
	return 0;
}

static int attach(void)
{
	union ibv_gid g;
	if (gid(arg[1], &g))
		return -1;
	int rc = ibv_attach_mcast(qp, &g, 0);
	if (rc)
		return fail("attach", rc);
	// Attaching programs the MAC filter only: without a socket that is a member
	// the packet ends in IP. The socket stays open.
	int v4 = IN6_IS_ADDR_V4MAPPED((struct in6_addr *)g.raw);
	int s = socket(v4 ? AF_INET : AF_INET6, SOCK_DGRAM, 0);
	if (v4) {
		struct ip_mreqn m = { .imr_ifindex = if_nametoindex("eth0") };
		memcpy(&m.imr_multiaddr, g.raw + 12, 4);
		rc = setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &m, sizeof m);
	} else {
		struct ipv6_mreq m = { .ipv6mr_interface = if_nametoindex("eth0") };
		memcpy(&m.ipv6mr_multiaddr, g.raw, 16);
		rc = setsockopt(s, IPPROTO_IPV6, IPV6_JOIN_GROUP, &m, sizeof m);
	}
	if (rc)
		return fail("join", errno);
	printf("ok\n");
	return 0;
}

static int make_ah(void)
{
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = gididx, .hop_limit = 64 } };
	if (gid(arg[1], &a.grh.dgid))
		return -1;
	if (!(ah = ibv_create_ah(pd, &a)))
		return fail("AH", errno);
	printf("ok\n");
	return 0;
}

static long long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ll + t.tv_nsec / 1000000;
}

static int poll_cq(void)
{
	struct ibv_wc w;
	long long end = now_ms() + num(1);
	int n;
	while (!(n = ibv_poll_cq(cq, 1, &w)) && now_ms() < end)
		usleep(200);
	if (n < 0)
		return fail("poll", EIO);
	if (!n) {
		printf("ok none\n");
		return 0;
	}
	// rxe of Linux 6.1 hands the kernel's flags through as they are, where
	// "with invalidate" is the bit that libibverbs calls IP_CSUM_OK.
	uint32_t imm = 0;
	if (w.wc_flags & (IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK))
		imm = w.invalidated_rkey;
	else if (w.wc_flags & IBV_WC_WITH_IMM)
		imm = ntohl(w.imm_data);
	printf("ok id=%llu status=%d opcode=%d len=%u flags=%u imm=0x%x srcqp=0x%x\n", (unsigned long long)w.wr_id,
	       w.status, w.opcode, w.byte_len, w.wc_flags, imm, w.src_qp);
	return 0;
}

static int do_state(void)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	int rc = ibv_query_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &i);
	if (rc)
		return fail("query", rc);
	printf("ok state=%d\n", a.qp_state);
	return 0;
}

int main(void)
{
	char line[512];
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof line, stdin)) {
		nargs = 0;
		for (char *t = strtok(line, " \n"); t && nargs < 12; t = strtok(NULL, " \n"))
			arg[nargs++] = t;
		if (!nargs)
			continue;
		const char *c = arg[0];
		if (!strcmp(c, "qp") && nargs == 6) {
			make_qp();
		} else if (!qp) {
			fail("no queue pair", EINVAL);
		} else if (!strcmp(c, "connect")) {
			connect_qp();
		} else if (!strcmp(c, "fill") && inside(num(1), num(2))) {
			for (uint32_t i = 0; i < num(2); i++)
				buf[num(1) + i] = pattern(num(3), i);
			printf("ok\n");
		} else if (!strcmp(c, "check") && inside(num(1), num(2))) {
			uint32_t i = 0;
			while (i < num(2) && buf[num(1) + i] == pattern(num(3), i))
				i++;
			if (i == num(2))
				printf("ok\n");
			else
				printf("error octet %u is %#x, not %#x\n", i, buf[num(1) + i], pattern(num(3), i));
		} else if (!strcmp(c, "recv")) {
			post_recv();
		} else if (!strcmp(c, "ah")) {
			make_ah();
		} else if (!strcmp(c, "window")) {
			window();
		} else if (!strcmp(c, "attach")) {
			attach();
		} else if (!strcmp(c, "poll")) {
			poll_cq();
		} else if (!strcmp(c, "state")) {
			do_state();
		} else if (strstr("send sendimm sendinv udsend write writeimm read", c)) {
			post_send();
		} else {
			fail(c, EINVAL);
		}
	}
	return 0;
}
