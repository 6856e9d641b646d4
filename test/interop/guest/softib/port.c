// SPDX-License-Identifier: GPL-2.0
/*
 * softib makes a soft InfiniBand port of the kernel's Soft-RoCE, so that ib_ipoib, which takes no
 * other, runs without an adapter. It is for tests.
 *
 * The RDMA core sees link layer InfiniBand, a LID, one GID, a table of P_Keys and a subnet
 * administrator. The wire stays RoCEv2 over IPv6: the GID is the link-local address of the network
 * device, and a packet's GIDs are its IPv6 addresses. LIDs are the last octet of a GID and are never
 * on the wire, but inside MADs.
 *
 * No line of Soft-RoCE is changed. Kbuild compiles it with some of its calls renamed, object by
 * object, and the functions of those names are here. One device at a time.
 */
#include <linux/inet.h>
#include <linux/netdevice.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <net/udp_tunnel.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_sa.h>
#include "rxe.h"
#include "rxe_loc.h"
#include "rxe_queue.h"

static uint hop_limit = 64;
module_param(hop_limit, uint, 0444);
MODULE_PARM_DESC(hop_limit, "hop limit of paths; with 0 ports need no GRH");

static uint group_mtu = 2048;
module_param(group_mtu, uint, 0444);
MODULE_PARM_DESC(group_mtu, "MTU of groups and paths, at most that of the port");

static uint rate = IB_RATE_10_GBPS;
module_param(rate, uint, 0444);

static uint lifetime = 18;
module_param(lifetime, uint, 0444);
MODULE_PARM_DESC(lifetime, "packet life time: 4.096 us, doubled so often");

static uint qkey = 0x0b1b;
module_param(qkey, uint, 0444);

static bool sa = true;
module_param(sa, bool, 0644);
MODULE_PARM_DESC(sa, "whether the subnet administrator answers");

static struct rxe_dev *device;
static struct ib_device_ops stock, ours;
static int (*encap_rcv)(struct sock *sk, struct sk_buff *skb);

/* ---- partitions and events ---- */

#define PKEYS 8

static u16 pkeys[PKEYS] = { IB_DEFAULT_PKEY_FULL };

static void tell(enum ib_event_type what)
{
	struct ib_event ev = { .event = what, .element.port_num = 1 };

	if (!device)
		return;
	ev.device = &device->ib_dev;
	ib_dispatch_event(&ev);
}

/* The table as a list: 0xffff,0x8001. An entry of 0 is a hole. */
static int set_pkeys(const char *text, const struct kernel_param *kp)
{
	char buf[80], *at = buf, *word;
	u16 table[PKEYS] = {};
	int i = 0;

	if (strscpy(buf, text, sizeof(buf)) < 0)
		return -E2BIG;
	while ((word = strsep(&at, ",\n")) && *word) {
		if (i == PKEYS || kstrtou16(word, 0, &table[i++]))
			return -EINVAL;
	}
	memcpy(pkeys, table, sizeof(pkeys));
	tell(IB_EVENT_PKEY_CHANGE);
	return 0;
}

static int get_pkeys(char *buf, const struct kernel_param *kp)
{
	int i, n = 0;

	for (i = 0; i < PKEYS; i++)
		n += sysfs_emit_at(buf, n, "%#06x%c", pkeys[i], i < PKEYS - 1 ? ',' : '\n');
	return n;
}

static const struct kernel_param_ops pkey_ops = { .set = set_pkeys, .get = get_pkeys };
module_param_cb(pkeys, &pkey_ops, NULL, 0644);
MODULE_PARM_DESC(pkeys, "P_Key table, such as 0xffff,0x8001");

/* What the subnet manager would tell the port of. */
static int set_event(const char *text, const struct kernel_param *kp)
{
	if (sysfs_streq(text, "reregister"))
		tell(IB_EVENT_CLIENT_REREGISTER);
	else if (sysfs_streq(text, "sm"))
		tell(IB_EVENT_SM_CHANGE);
	else
		return -EINVAL;
	return 0;
}

static const struct kernel_param_ops event_ops = { .set = set_event };
module_param_cb(event, &event_ops, NULL, 0200);
MODULE_PARM_DESC(event, "reregister or sm");

/* The place of the port's key of a partition; -1: it has none. */
static int place(u16 key)
{
	int i;

	for (i = 0; i < PKEYS; i++)
		if ((key & 0x7fff) && !((pkeys[i] ^ key) & 0x7fff))
			return i;
	return -1;
}

static u16 key_at(unsigned int i)
{
	return i < PKEYS ? pkeys[i] : 0;
}

/* ---- GIDs and LIDs ---- */

static union ib_gid gids[256];	/* by LID */

static void own_gid(union ib_gid *gid)
{
	gid->global.subnet_prefix = device->port.subnet_prefix;
	gid->global.interface_id = device->port.port_guid;
}

static u16 lid_of(const union ib_gid *gid)
{
	u8 lid = gid->raw[15] ? gid->raw[15] : 0xff;

	if (gid->raw[0] == 0xff)
		return 0xc000 | gid->raw[15];
	gids[lid] = *gid;
	return lid;
}

static bool gid_of(u16 lid, union ib_gid *gid)
{
	if (lid >= ARRAY_SIZE(gids) || !gids[lid].global.interface_id)
		return false;
	*gid = gids[lid];
	return true;
}

/* ---- address vectors ---- */

int rxe_av_chk_attr(struct rxe_dev *rxe, struct rdma_ah_attr *attr)
{
	return 0;
}

void rxe_init_av(struct rdma_ah_attr *attr, struct rxe_av *av)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(attr);
	union ib_gid sgid, dgid = {};

	own_gid(&sgid);
	memset(av, 0, sizeof(*av));
	av->port_num = rdma_ah_get_port_num(attr);
	av->network_type = RXE_NETWORK_TYPE_IPV6;
	av->grh.hop_limit = 64;
	if (rdma_ah_get_ah_flags(attr) & IB_AH_GRH) {
		dgid = grh->dgid;
		av->grh.flow_label = grh->flow_label;
		av->grh.traffic_class = grh->traffic_class;
		if (grh->hop_limit)
			av->grh.hop_limit = grh->hop_limit;
	} else {
		gid_of(rdma_ah_get_dlid(attr), &dgid);
	}
	/* the subnet administrator lives here */
	if (dgid.global.interface_id == cpu_to_be64(IB_SA_WELL_KNOWN_GUID))
		dgid = sgid;
	memcpy(av->grh.dgid.raw, dgid.raw, sizeof(dgid));
	if (!memcmp(&sgid, &dgid, sizeof(sgid)))	/* that is how rxe tells its own packets */
		memcpy(av->dmac, device->ndev->dev_addr, ETH_ALEN);
	rdma_gid2ip((struct sockaddr *)&av->sgid_addr, &sgid);
	rdma_gid2ip((struct sockaddr *)&av->dgid_addr, &dgid);
}

void rxe_av_to_attr(struct rxe_av *av, struct rdma_ah_attr *attr)
{
	struct ib_global_route *grh = rdma_ah_retrieve_grh(attr);
	union ib_gid dgid;

	memcpy(dgid.raw, av->grh.dgid.raw, sizeof(dgid));
	attr->type = RDMA_AH_ATTR_TYPE_IB;
	grh->dgid = dgid;
	grh->hop_limit = av->grh.hop_limit;
	grh->flow_label = av->grh.flow_label;
	grh->traffic_class = av->grh.traffic_class;
	rdma_ah_set_ah_flags(attr, IB_AH_GRH);	/* each packet has an IPv6 header */
	rdma_ah_set_port_num(attr, av->port_num);
	rdma_ah_set_dlid(attr, lid_of(&dgid));
}

/* ---- packets ---- */

struct net_device *softib_ndev(const struct ib_gid_attr *attr)
{
	return device->ndev;
}

const struct ib_gid_attr *softib_find_gid(struct ib_device *dev, const union ib_gid *gid,
					  enum ib_gid_type type, u32 port, struct net_device *ndev)
{
	return rdma_find_gid_by_port(dev, gid, IB_GID_TYPE_IB, port, NULL);
}

/*
 * Soft-RoCE knows partition 0xffff only. Packets leave in that of their queue pair, or of the work
 * request on QP 1, and look like 0xffff while Soft-RoCE checks what came in for ours.
 *
 * Without a route a packet is lost, as on a cable that was pulled; it does not end the QP.
 */
int softib_prepare(struct rxe_av *av, struct rxe_pkt_info *pkt, struct sk_buff *skb)
{
	struct rxe_qp *qp = pkt->qp;
	int err = rxe_prepare(av, pkt, skb);

	if (!err)
		bth_set_pkey(pkt, key_at(qp_type(qp) == IB_QPT_GSI ?
					 pkt->wqe->wr.wr.ud.pkey_index : qp->attr.pkey_index));

	return err == -EHOSTUNREACH ? 0 : err;
}

int softib_xmit(struct rxe_qp *qp, struct rxe_pkt_info *pkt, struct sk_buff *skb)
{
	if (skb_dst(skb))
		return rxe_xmit_packet(qp, pkt, skb);
	kfree_skb(skb);
	if (qp_type(qp) != IB_QPT_RC && (pkt->mask & RXE_END_MASK) && (pkt->mask & RXE_REQ_MASK)) {
		pkt->wqe->state = wqe_state_done;
		rxe_sched_task(&qp->comp.task);
	}
	return 0;
}

#define HAS_KEY 0x50000	/* in the mark of a packet, with its P_Key */

static bool for_qp(struct rxe_pkt_info *pkt, u16 key)
{
	struct rxe_qp *qp;
	bool ok;

	if (bth_qpn(pkt) <= 1 || bth_qpn(pkt) == IB_MULTICAST_QPN)	/* an MGID has its P_Key */
		return place(key) >= 0 && pkey_match(key, pkeys[place(key)]);
	qp = rxe_pool_get_index(&pkt->rxe->qp_pool, bth_qpn(pkt));
	if (!qp)
		return false;
	ok = pkey_match(key, key_at(qp->attr.pkey_index));
	rxe_put(qp);
	return ok;
}

void softib_rcv(struct sk_buff *skb)
{
	struct rxe_pkt_info *pkt = SKB_TO_PKT(skb);
	u16 key;

	if (skb->len >= RXE_BTH_BYTES) {
		key = bth_pkey(pkt);
		skb->mark = HAS_KEY | key;
		bth_set_pkey(pkt, for_qp(pkt, key) ? IB_DEFAULT_PKEY_FULL : 0);
	}
	rxe_rcv(skb);
}

int softib_icrc_check(struct sk_buff *skb, struct rxe_pkt_info *pkt)
{
	bool checked = (skb->mark & ~0xffff) == HAS_KEY;
	int err;

	if (checked)
		bth_set_pkey(pkt, skb->mark & 0xffff);
	err = rxe_icrc_check(skb, pkt);
	if (checked && bth_qpn(pkt) == IB_MULTICAST_QPN)	/* it is looked at for each QP */
		bth_set_pkey(pkt, IB_DEFAULT_PKEY_FULL);
	return err;
}

/* Multicast is taken from the device: the IPv6 stack drops what nobody has joined with MLD. */
static int mcast_rcv(struct sk_buff *skb, struct net_device *ndev, struct packet_type *pt,
		     struct net_device *orig)
{
	unsigned int len;

	skb = skb_share_check(skb, GFP_ATOMIC);
	if (!skb)
		return 0;
	if (!device || ndev != device->ndev || skb->pkt_type == PACKET_OTHERHOST ||
	    !pskb_may_pull(skb, sizeof(struct ipv6hdr) + sizeof(struct udphdr)))
		goto drop;
	skb_set_transport_header(skb, sizeof(struct ipv6hdr));
	len = ntohs(ipv6_hdr(skb)->payload_len);
	if (!ipv6_addr_is_multicast(&ipv6_hdr(skb)->daddr) || ipv6_hdr(skb)->nexthdr != IPPROTO_UDP ||
	    udp_hdr(skb)->dest != htons(ROCE_V2_UDP_DPORT) || ntohs(udp_hdr(skb)->len) != len ||
	    pskb_trim_rcsum(skb, sizeof(struct ipv6hdr) + len))
		goto drop;
	skb_pull(skb, sizeof(struct ipv6hdr));
	return encap_rcv(NULL, skb);
drop:
	kfree_skb(skb);
	return 0;
}

static struct packet_type mcast = { .type = htons(ETH_P_IPV6), .func = mcast_rcv };

void softib_tunnel(struct net *net, struct socket *sock, struct udp_tunnel_sock_cfg *cfg)
{
	if (!encap_rcv) {
		encap_rcv = cfg->encap_rcv;
		dev_add_pack(&mcast);
	}
	setup_udp_tunnel_sock(net, sock, cfg);
}

void softib_net_exit(void)
{
	if (encap_rcv)
		dev_remove_pack(&mcast);
	encap_rcv = NULL;
	rxe_net_exit();
}

/* A completion says which LID the packet is from. */
int softib_cq_post(struct rxe_cq *cq, struct rxe_cqe *cqe, int solicited)
{
	struct rxe_qp *qp = cq->is_user ?
		rxe_pool_get_index(&device->qp_pool, cqe->uibwc.qp_num) : to_rqp(cqe->ibwc.qp);
	struct sk_buff *skb = qp ? skb_peek(&qp->req_pkts) : NULL;
	u16 lid = 0, key = skb ? max(place(skb->mark & 0xffff), 0) : 0;

	if (skb && skb->protocol == htons(ETH_P_IPV6))
		lid = lid_of((union ib_gid *)&ipv6_hdr(skb)->saddr);
	if (cq->is_user) {
		cqe->uibwc.slid = lid;
		cqe->uibwc.pkey_index = key;
		if (qp)
			rxe_put(qp);
	} else {
		cqe->ibwc.slid = lid;
		cqe->ibwc.pkey_index = key;
		cqe->ibwc.wc_flags &= ~(IB_WC_WITH_NETWORK_HDR_TYPE | IB_WC_WITH_VLAN);
	}
	return rxe_cq_post(cq, cqe, solicited);
}

/* ---- queue pairs ---- */

/* ib_ipoib frees a connection that it was asked for when its last WQE is said to be reached. */
static void last_wqe(struct rxe_qp *qp)
{
	struct ib_event ev = {
		.device = qp->ibqp.device, .element.qp = &qp->ibqp, .event = IB_EVENT_QP_LAST_WQE_REACHED,
	};

	if (qp->srq && qp->ibqp.event_handler)
		qp->ibqp.event_handler(&ev, qp->ibqp.qp_context);
}

void softib_qp_error(struct rxe_qp *qp)
{
	bool was = qp->attr.qp_state == IB_QPS_ERR;

	rxe_qp_error(qp);
	if (!was)
		last_wqe(qp);
}

static int modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	bool was = to_rqp(ibqp)->attr.qp_state == IB_QPS_ERR;
	int err;

	if ((mask & IB_QP_PKEY_INDEX) && attr->pkey_index >= PKEYS)
		return -EINVAL;
	err = stock.modify_qp(ibqp, attr, mask, udata);

	if (!err && !was && (mask & IB_QP_STATE) && attr->qp_state == IB_QPS_ERR)
		last_wqe(to_rqp(ibqp));
	return err;
}

/* take_back removes what a queue pair has completed from a completion queue. */
static void take_back(struct ib_cq *ibcq, struct ib_qp *gone)
{
	struct rxe_cq *cq = to_rcq(ibcq);
	struct rxe_queue *q = cq->queue;
	u32 i, to, end, n = 0;
	struct rxe_cqe *from;
	unsigned long flags;

	if (cq->is_user)
		return;
	spin_lock_irqsave(&cq->cq_lock, flags);
	to = queue_get_consumer(q, QUEUE_TYPE_TO_CLIENT);
	end = queue_get_producer(q, QUEUE_TYPE_TO_CLIENT);
	for (i = to; i != end; i = queue_next_index(q, i)) {
		from = queue_addr_from_index(q, i);
		if (from->ibwc.qp == gone) {
			n++;
			continue;
		}
		memmove(queue_addr_from_index(q, to), from, sizeof(*from));
		to = queue_next_index(q, to);
	}
	q->index = to;
	smp_store_release(&q->buf->producer_index, to);
	spin_unlock_irqrestore(&cq->cq_lock, flags);
	if (n)
		pr_info("QP %#x was destroyed with %u completions that nobody had looked at\n", gone->qp_num, n);
}

/*
 * An adapter's driver takes what a queue pair has completed out of its completion queue when it is destroyed.
 * Soft-RoCE leaves it there. ib_ipoib destroys a queue pair whose sends did not complete within 5 s, frees what their
 * completions point to, and crashed when it came upon them.
 */
static int destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	int err = stock.destroy_qp(ibqp, udata);

	if (err)
		return err;
	if (ibqp->send_cq)
		take_back(ibqp->send_cq, ibqp);
	if (ibqp->recv_cq && ibqp->recv_cq != ibqp->send_cq)
		take_back(ibqp->recv_cq, ibqp);
	return 0;
}

/* ---- subnet administration ---- */

#define STATUS_INVALID	0x0200	/* ERR_REQ_INVALID */
#define STATUS_NONE	0x0300	/* ERR_NO_RECORDS */
#define STATUS_METHOD	0x000c	/* method and attribute are not supported together */
#define EXACTLY		0x80	/* a selector */

static void be16_at(u8 *p, u16 v)
{
	*(__be16 *)p = cpu_to_be16(v);
}

static void be32_at(u8 *p, u32 v)
{
	*(__be32 *)p = cpu_to_be32(v);
}

static u8 mtu_code(void)
{
	return EXACTLY | min_t(u8, ib_mtu_int_to_enum(group_mtu), device->port.attr.active_mtu);
}

/* A PathRecord (IBA 15.2.5.16): DGID at 8, SGID at 24, LIDs at 40. */
static u16 sa_path(u8 *r, ib_sa_comp_mask mask)
{
	union ib_gid *dgid = (union ib_gid *)(r + 8), *sgid = (union ib_gid *)(r + 24);
	u16 key = mask & IB_SA_PATH_REC_PKEY ? be16_to_cpup((__be16 *)(r + 50)) : IB_DEFAULT_PKEY_FULL;

	if (place(key) < 0)
		return STATUS_NONE;

	if (!(mask & IB_SA_PATH_REC_DGID) &&
	    (!(mask & IB_SA_PATH_REC_DLID) || !gid_of(be16_to_cpup((__be16 *)(r + 40)), dgid)))
		return STATUS_NONE;
	if (!(mask & IB_SA_PATH_REC_SGID))
		own_gid(sgid);
	be16_at(r + 40, lid_of(dgid));
	be16_at(r + 42, lid_of(sgid));
	be32_at(r + 44, hop_limit);
	r[48] = 0;		/* traffic class */
	r[49] = 0x80 | 1;	/* reversible; one path */
	be16_at(r + 50, key | 0x8000);
	be16_at(r + 52, 0);	/* QoS class, SL */
	r[54] = mtu_code();
	r[55] = EXACTLY | rate;
	r[56] = EXACTLY | lifetime;
	return 0;
}

/* An MCMemberRecord (IBA 15.2.5.17): MGID at 0, PortGID at 16, MLID at 36. */
static u16 sa_member(u8 *r, ib_sa_comp_mask mask, u8 method)
{
	union ib_gid *mgid = (union ib_gid *)r;
	u16 key = mask & IB_SA_MCMEMBER_REC_PKEY ? be16_to_cpup((__be16 *)(r + 40)) : IB_DEFAULT_PKEY_FULL;

	if (place(key) < 0)
		return STATUS_INVALID;
	if (!(mask & IB_SA_MCMEMBER_REC_MGID) || mgid->raw[0] != 0xff)
		return STATUS_INVALID;
	if (method == IB_SA_METHOD_DELETE)
		return 0;
	if (!(mask & IB_SA_MCMEMBER_REC_PORT_GID))
		own_gid((union ib_gid *)(r + 16));
	be32_at(r + 32, qkey);
	be16_at(r + 36, lid_of(mgid));
	r[38] = mtu_code();
	r[39] = 0;
	be16_at(r + 40, key | 0x8000);
	r[42] = EXACTLY | rate;
	r[43] = EXACTLY | lifetime;
	be32_at(r + 44, hop_limit);
	r[48] = (mgid->raw[1] & 0x0f) << 4 | (r[48] & 0x0f);
	return 0;
}

static int process_mad(struct ib_device *dev, int flags, u32 port, const struct ib_wc *wc,
		       const struct ib_grh *grh, const struct ib_mad *in, struct ib_mad *out,
		       size_t *out_size, u16 *pkey_index)
{
	struct ib_sa_mad *answer = (struct ib_sa_mad *)out;
	u8 method = in->mad_hdr.method;
	ib_sa_comp_mask mask;
	u16 status = 0;

	if (!sa || in->mad_hdr.mgmt_class != IB_MGMT_CLASS_SUBN_ADM || (method & IB_MGMT_METHOD_RESP) ||
	    method == IB_MGMT_METHOD_REPORT)
		return IB_MAD_RESULT_SUCCESS;
	memcpy(out, in, sizeof(*in));
	*out_size = sizeof(*in);
	mask = answer->sa_hdr.comp_mask;
	switch (be16_to_cpu(in->mad_hdr.attr_id)) {
	case IB_SA_ATTR_PATH_REC:
		status = sa_path(answer->data, mask);
		break;
	case IB_SA_ATTR_MC_MEMBER_REC:
		status = sa_member(answer->data, mask, method);
		break;
	case IB_SA_ATTR_CLASS_PORTINFO:
		memset(answer->data, 0, sizeof(answer->data));
		answer->data[0] = 1;
		answer->data[1] = IB_SA_CLASS_VERSION;
		answer->data[7] = lifetime;
		break;
	case IB_SA_ATTR_INFORM_INFO:	/* nothing happens but by the parameter report */
		break;
	default:
		status = STATUS_METHOD;
	}
	answer->mad_hdr.status = cpu_to_be16(status);
	answer->mad_hdr.method = method == IB_SA_METHOD_DELETE ?
		IB_SA_METHOD_DELETE_RESP : IB_MGMT_METHOD_GET_RESP;
	return IB_MAD_RESULT_SUCCESS | IB_MAD_RESULT_REPLY;
}

/* ---- reports of the subnet administrator, to the port itself ---- */

static void report_sent(struct ib_mad_agent *agent, struct ib_mad_send_wc *wc)
{
	complete(agent->context);
}

static int report(u16 trap, const struct in6_addr *about)
{
	struct rdma_ah_attr to = { .type = RDMA_AH_ATTR_TYPE_IB, .port_num = 1 };
	DECLARE_COMPLETION_ONSTACK(sent);
	struct ib_mad_send_buf *buf;
	struct ib_mad_agent *agent;
	struct ib_sa_mad *mad;
	union ib_gid own;
	int err = -ENOMEM;

	own_gid(&own);
	agent = ib_register_mad_agent(&device->ib_dev, 1, IB_QPT_GSI, NULL, 0, report_sent, NULL, &sent, 0);
	if (IS_ERR(agent))
		return PTR_ERR(agent);
	buf = ib_create_send_mad(agent, 1, 0, 0, IB_MGMT_SA_HDR, IB_MGMT_SA_DATA, GFP_KERNEL,
				 IB_MGMT_BASE_VERSION);
	if (IS_ERR(buf))
		goto out;
	rdma_ah_set_dlid(&to, lid_of(&own));
	rdma_ah_set_grh(&to, &own, 0, 0, 64, 0);
	buf->ah = rdma_create_ah(agent->qp->pd, &to, 0);
	if (IS_ERR(buf->ah))
		goto free;
	mad = buf->mad;
	mad->mad_hdr.base_version = IB_MGMT_BASE_VERSION;
	mad->mad_hdr.mgmt_class = IB_MGMT_CLASS_SUBN_ADM;
	mad->mad_hdr.class_version = IB_SA_CLASS_VERSION;
	mad->mad_hdr.method = IB_MGMT_METHOD_REPORT;
	mad->mad_hdr.attr_id = cpu_to_be16(IB_SA_ATTR_NOTICE);
	mad->mad_hdr.tid = cpu_to_be64((u64)agent->hi_tid << 32 | 1);
	/* a Notice (IBA 13.4.8.2): generic, of type 3 by a class manager; the GID is in its details */
	mad->data[0] = 0x80 | 3;
	mad->data[3] = 4;
	be16_at(mad->data + 4, trap);
	be16_at(mad->data + 6, lid_of(&own));
	memcpy(mad->data + 16, about, sizeof(*about));
	memcpy(mad->data + 64, &own, sizeof(own));
	err = ib_post_send_mad(buf, NULL);
	if (!err)
		wait_for_completion(&sent);
	rdma_destroy_ah(buf->ah, 0);
free:
	ib_free_send_mad(buf);
out:
	ib_unregister_mad_agent(agent);
	return err;
}

static int set_report(const char *text, const struct kernel_param *kp)
{
	struct in6_addr about;
	char gid[48];
	u16 trap;

	if (!device || sscanf(text, "%hu %47s", &trap, gid) != 2 || !in6_pton(gid, -1, about.s6_addr, -1, NULL))
		return -EINVAL;
	return report(trap, &about);
}

static const struct kernel_param_ops report_ops = { .set = set_report };
module_param_cb(report, &report_ops, NULL, 0200);
MODULE_PARM_DESC(report, "a trap and a GID, such as 66 ff12:401b:ffff::1, to be reported");

/* ---- the port ---- */

static int query_port(struct ib_device *dev, u32 port, struct ib_port_attr *attr)
{
	union ib_gid gid;

	stock.query_port(dev, port, attr);	/* fails, since this is no Ethernet, after it has set all */
	own_gid(&gid);
	attr->lid = attr->sm_lid = lid_of(&gid);
	attr->gid_tbl_len = 1;
	attr->pkey_tbl_len = PKEYS;
	attr->active_width = IB_WIDTH_4X;
	attr->active_speed = IB_SPEED_SDR;
	attr->subnet_timeout = lifetime;
	return 0;
}

static int query_gid(struct ib_device *dev, u32 port, int index, union ib_gid *gid)
{
	if (index)
		return -EINVAL;
	own_gid(gid);
	return 0;
}

static int query_pkey(struct ib_device *dev, u32 port, u16 index, u16 *key)
{
	if (index >= PKEYS)
		return -EINVAL;
	*key = pkeys[index];
	return 0;
}

static enum rdma_link_layer link_layer(struct ib_device *dev, u32 port)
{
	return IB_LINK_LAYER_INFINIBAND;
}

static int immutable(struct ib_device *dev, u32 port, struct ib_port_immutable *p)
{
	int err = stock.get_port_immutable(dev, port, p);

	/* without QP 0: no subnet manager comes by */
	p->core_cap_flags = (RDMA_CORE_PORT_IBA_IB & ~RDMA_CORE_CAP_IB_SMI) |
		(hop_limit ? RDMA_CORE_CAP_IB_GRH_REQUIRED : 0);
	return err;
}

void softib_set_ops(struct ib_device *dev, const struct ib_device_ops *ops)
{
	device = to_rdev(dev);
	dev->dev.parent = device->ndev->dev.parent;
	stock = ours = *ops;
	ours.modify_qp = modify_qp;
	ours.destroy_qp = destroy_qp;
	ours.process_mad = process_mad;
	ours.query_port = query_port;
	ours.query_gid = query_gid;
	ours.query_pkey = query_pkey;
	ours.get_link_layer = link_layer;
	ours.get_port_immutable = immutable;
	ib_set_device_ops(dev, &ours);
}
