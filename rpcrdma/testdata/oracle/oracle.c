/*
 * oracle encode N: N headers, calls and replies, each as "hexadecimal text".
 * oracle decode: for each line "h HEX", "c HEX" or "r HEX" its text, or "bad".
 *
 * Headers go through what rpcgen makes of headers.x, the heads of RPC calls and
 * replies through libtirpc.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rpc/rpc.h>
#include "headers.h"

/* The same numbers everywhere: each is drawn in a statement of its own. */
static unsigned long long state = 42;

static unsigned int rnd(unsigned int n)
{
	state = state * 6364136223846793005ULL + 1442695040888963407ULL;
	return n ? (unsigned int)(state >> 33) % n : (unsigned int)(state >> 16);
}

static void seg_text(seg *s) { printf("(%08x %u %llx)", s->handle, s->length, (unsigned long long)s->offset); }

static void chunk_text(wchunk *c)
{
	printf("[");
	for (unsigned int i = 0; i < c->segs.segs_len; i++)
		seg_text(&c->segs.segs_val[i]);
	printf("]");
}

static void lists_text(lists *l)
{
	printf(" reads{");
	for (rlist *r = l->reads; r; r = r->next) {
		printf("%u", r->item.position);
		seg_text(&r->item.target);
	}
	printf("} writes{");
	for (wlist *w = l->writes; w; w = w->next)
		chunk_text(&w->item);
	printf("} reply");
	if (l->reply)
		chunk_text(l->reply);
	else
		printf("-");
}

static void head_text(unsigned int xid, unsigned int vers, unsigned int credit, int proc)
{
	printf("%08x v%u %u proc %d", xid, vers, credit, proc);
}

static void text1(header1 *h)
{
	head_text(h->xid, h->vers, h->credit, h->body.proc);
	switch (h->body.proc) {
	case P1_MSG: lists_text(&h->body.body1_u.msg); break;
	case P1_NOMSG: lists_text(&h->body.body1_u.nomsg); break;
	case P1_MSGP:
		printf(" align %u %u", h->body.body1_u.msgp.align, h->body.body1_u.msgp.thresh);
		lists_text(&h->body.body1_u.msgp.l);
		break;
	case P1_DONE: break;
	case P1_ERROR:
		printf(" error %d", h->body.body1_u.err.code);
		if (h->body.body1_u.err.code == C1_VERS)
			printf(" %u %u", h->body.body1_u.err.error1_u.vers.low, h->body.body1_u.err.error1_u.vers.high);
	}
}

static void directed_text(directed *d)
{
	printf(" dir %d inv %08x", d->direction, d->inv);
	lists_text(&d->l);
}

static void text2(header2 *h)
{
	error2 *e = &h->body.body2_u.err;
	head_text(h->xid, h->vers, h->credit, h->body.proc);
	switch (h->body.proc) {
	case P2_MSG: directed_text(&h->body.body2_u.msg); break;
	case P2_NOMSG: directed_text(&h->body.body2_u.nomsg); break;
	case P2_ERROR:
		printf(" error %d", e->code);
		if (e->code == C2_VERS)
			printf(" %u %u", e->error2_u.vers.low, e->error2_u.vers.high);
		if (e->code == C2_REPLY)
			printf(" %d %u %u", e->error2_u.reply.processed, e->error2_u.reply.index, e->error2_u.reply.needed);
		break;
	case P2_OPTION:
		printf(" dir %d type %08x info ", h->body.body2_u.opt.direction, h->body.body2_u.opt.type);
		for (unsigned int i = 0; i < h->body.body2_u.opt.info.info_len; i++)
			printf("%02x", (unsigned char)h->body.body2_u.opt.info.info_val[i]);
	}
}

static void *zalloc(size_t n)
{
	void *p = calloc(1, n);
	if (!p)
		exit(2);
	return p;
}

static seg make_seg(void)
{
	seg s;
	s.handle = rnd(0);
	s.length = rnd(2) ? rnd(0) : rnd(70000);
	s.offset = (unsigned long long)rnd(0) << 32;
	s.offset |= rnd(0);
	return s;
}

static wchunk make_chunk(void)
{
	wchunk c;
	c.segs.segs_len = rnd(4);
	c.segs.segs_val = zalloc(4 * sizeof(seg));
	for (unsigned int i = 0; i < c.segs.segs_len; i++)
		c.segs.segs_val[i] = make_seg();
	return c;
}

static lists make_lists(void)
{
	lists l = { 0 };
	rlist **r = &l.reads;
	wlist **w = &l.writes;
	for (unsigned int n = rnd(4); n; n--, r = &(*r)->next) {
		*r = zalloc(sizeof(rlist));
		(*r)->item.position = rnd(1000) * 4;
		(*r)->item.target = make_seg();
	}
	for (unsigned int n = rnd(3); n; n--, w = &(*w)->next) {
		*w = zalloc(sizeof(wlist));
		(*w)->item = make_chunk();
	}
	if (rnd(2)) {
		l.reply = zalloc(sizeof(wchunk));
		*l.reply = make_chunk();
	}
	return l;
}

static void finish(XDR *x, char *buf, int ok)
{
	unsigned int n = xdr_getpos(x);
	if (!ok)
		exit(3);
	for (unsigned int i = 0; i < n; i++)
		printf("%02x", (unsigned char)buf[i]);
	printf(" ");
}

static void make1(void)
{
	static const proc1 procs[] = { P1_MSG, P1_NOMSG, P1_ERROR, P1_ERROR, P1_MSG, P1_MSGP, P1_DONE };
	char buf[8192] = { 0 };
	XDR x;
	header1 h;
	h.xid = rnd(0);
	h.vers = 1;
	h.credit = rnd(100);
	h.body.proc = procs[rnd(7)];
	switch (h.body.proc) {
	case P1_MSG: h.body.body1_u.msg = make_lists(); break;
	case P1_NOMSG: h.body.body1_u.nomsg = make_lists(); break;
	case P1_MSGP: h.body.body1_u.msgp.align = rnd(0); h.body.body1_u.msgp.thresh = rnd(0); h.body.body1_u.msgp.l = make_lists(); break;
	case P1_DONE: break;
	case P1_ERROR:
		h.body.body1_u.err.code = 1 + rnd(2);
		h.body.body1_u.err.error1_u.vers.low = rnd(3);
		h.body.body1_u.err.error1_u.vers.high = rnd(3);
	}
	xdrmem_create(&x, buf, sizeof buf, XDR_ENCODE);
	printf("h ");
	finish(&x, buf, xdr_header1(&x, &h));
	text1(&h);
	printf("\n");
}

static void make2(void)
{
	static const proc2 procs[] = { P2_MSG, P2_NOMSG, P2_MSG, P2_NOMSG, P2_ERROR, P2_OPTION };
	char buf[8192] = { 0 };
	XDR x;
	header2 h;
	directed d = { 0 };
	error2 *e = &h.body.body2_u.err;
	option *o = &h.body.body2_u.opt;
	h.xid = rnd(0);
	h.vers = 2;
	h.credit = rnd(100);
	d.direction = rnd(2);
	h.body.proc = procs[rnd(6)];
	switch (h.body.proc) {
	case P2_MSG:
	case P2_NOMSG:
		d.l = make_lists();
		if (d.l.reads && rnd(2))
			d.inv = d.l.reads->item.target.handle;
		h.body.body2_u.msg = d;
		break;
	case P2_ERROR:
		e->code = 1 + rnd(5);
		if (e->code == C2_REPLY) {
			e->error2_u.reply.processed = rnd(2);
			e->error2_u.reply.index = rnd(9);
			e->error2_u.reply.needed = rnd(0);
		} else {
			e->error2_u.vers.low = rnd(3);
			e->error2_u.vers.high = rnd(5);
		}
		break;
	case P2_OPTION:
		o->direction = rnd(2);
		o->type = rnd(0);
		o->info.info_len = rnd(20);
		o->info.info_val = zalloc(20);
		for (unsigned int i = 0; i < o->info.info_len; i++)
			o->info.info_val[i] = rnd(256);
	}
	xdrmem_create(&x, buf, sizeof buf, XDR_ENCODE);
	printf("h ");
	finish(&x, buf, xdr_header2(&x, &h));
	text2(&h);
	printf("\n");
}

static void auth_text(struct opaque_auth *a)
{
	printf(" auth %u ", (unsigned int)a->oa_flavor);
	for (unsigned int i = 0; i < a->oa_length; i++)
		printf("%02x", (unsigned char)a->oa_base[i]);
}

static void call_text(struct rpc_msg *m)
{
	printf("%08x prog %u vers %u proc %u", (unsigned int)m->rm_xid, (unsigned int)m->rm_call.cb_prog,
		(unsigned int)m->rm_call.cb_vers, (unsigned int)m->rm_call.cb_proc);
	auth_text(&m->rm_call.cb_cred);
	auth_text(&m->rm_call.cb_verf);
}

static void reply_text(struct rpc_msg *m)
{
	printf("%08x", (unsigned int)m->rm_xid);
	if (m->rm_reply.rp_stat == MSG_DENIED) {
		struct rejected_reply *r = &m->rm_reply.rp_rjct;
		printf(" denied %u", r->rj_stat);
		if (r->rj_stat == RPC_MISMATCH)
			printf(" %u %u", (unsigned int)r->rj_vers.low, (unsigned int)r->rj_vers.high);
		else
			printf(" %u", r->rj_why);
		return;
	}
	printf(" accepted %u", m->rm_reply.rp_acpt.ar_stat);
	if (m->rm_reply.rp_acpt.ar_stat == PROG_MISMATCH)
		printf(" %u %u", (unsigned int)m->rm_reply.rp_acpt.ar_vers.low, (unsigned int)m->rm_reply.rp_acpt.ar_vers.high);
	auth_text(&m->rm_reply.rp_acpt.ar_verf);
}

static void make_auth(struct opaque_auth *a)
{
	a->oa_flavor = rnd(7);
	a->oa_length = rnd(3) ? rnd(40) : 0;
	a->oa_base = zalloc(40);
	for (unsigned int i = 0; i < a->oa_length; i++)
		a->oa_base[i] = rnd(256);
}

static struct rpc_msg message(enum msg_type direction)
{
	struct rpc_msg m;
	memset(&m, 0, sizeof m);
	m.rm_xid = rnd(0);
	m.rm_direction = direction;
	return m;
}

static void make_call(void)
{
	char buf[2048] = { 0 }; /* libtirpc does not write padding */
	XDR x;
	struct rpc_msg m = message(CALL);
	m.rm_call.cb_rpcvers = 2;
	m.rm_call.cb_prog = rnd(0);
	m.rm_call.cb_vers = rnd(9);
	m.rm_call.cb_proc = rnd(30);
	make_auth(&m.rm_call.cb_cred);
	make_auth(&m.rm_call.cb_verf);
	xdrmem_create(&x, buf, sizeof buf, XDR_ENCODE);
	printf("c ");
	finish(&x, buf, xdr_callmsg(&x, &m));
	call_text(&m);
	printf("\n");
}

static bool_t nothing(XDR *x, ...) { (void)x; return TRUE; }

static void make_reply(void)
{
	char buf[2048] = { 0 }; /* libtirpc does not write padding */
	XDR x;
	struct rpc_msg m = message(REPLY);
	if (rnd(3) == 0) {
		m.rm_reply.rp_stat = MSG_DENIED;
		m.rm_reply.rp_rjct.rj_stat = rnd(2);
		if (m.rm_reply.rp_rjct.rj_stat == RPC_MISMATCH) {
			m.rm_reply.rp_rjct.rj_vers.low = rnd(4);
			m.rm_reply.rp_rjct.rj_vers.high = rnd(4);
		} else {
			m.rm_reply.rp_rjct.rj_why = 1 + rnd(7);
		}
	} else {
		m.rm_reply.rp_stat = MSG_ACCEPTED;
		m.rm_reply.rp_acpt.ar_stat = rnd(6);
		make_auth(&m.rm_reply.rp_acpt.ar_verf);
		if (m.rm_reply.rp_acpt.ar_stat == PROG_MISMATCH) {
			m.rm_reply.rp_acpt.ar_vers.low = rnd(4);
			m.rm_reply.rp_acpt.ar_vers.high = rnd(9);
		} else {
			m.rm_reply.rp_acpt.ar_results.proc = (xdrproc_t)nothing;
		}
	}
	xdrmem_create(&x, buf, sizeof buf, XDR_ENCODE);
	printf("r ");
	finish(&x, buf, xdr_replymsg(&x, &m));
	reply_text(&m);
	printf("\n");
}

static void decode(char kind, char *buf, int n)
{
	XDR x;
	header1 h1;
	header2 h2;
	struct rpc_msg m;
	int ok;

	memset(&h1, 0, sizeof h1);
	memset(&h2, 0, sizeof h2);
	memset(&m, 0, sizeof m);
	xdrmem_create(&x, buf, n, XDR_DECODE);
	switch (kind) {
	case 'h':
		/* An ERR_VERS is the same in every version. */
		if (n >= 8 && buf[7] == 1 && !buf[6] && !buf[5] && !buf[4]) {
			ok = xdr_header1(&x, &h1);
			ok ? text1(&h1) : (void)printf("bad");
		} else {
			ok = xdr_header2(&x, &h2);
			ok ? text2(&h2) : (void)printf("bad");
		}
		break;
	case 'c':
		ok = xdr_callmsg(&x, &m) && m.rm_direction == CALL;
		ok ? call_text(&m) : (void)printf("bad");
		break;
	default:
		m.rm_reply.rp_acpt.ar_results.proc = (xdrproc_t)nothing;
		ok = xdr_replymsg(&x, &m);
		ok ? reply_text(&m) : (void)printf("bad");
	}
	if (ok)
		printf(" after %u", xdr_getpos(&x));
	printf("\n");
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "encode")) {
		for (int n = atoi(argv[2]); n > 0; n--)
			switch (n % 8) {
			case 0: make_call(); break;
			case 1: make_reply(); break;
			case 2: case 3: make1(); break;
			default: make2();
			}
		return 0;
	}
	static char line[40000], buf[20000];
	while (fgets(line, sizeof line, stdin)) {
		int n = 0;
		unsigned int v;
		memset(buf, 0, sizeof buf);
		for (char *p = line + 2; sscanf(p, "%2x", &v) == 1; p += 2)
			buf[n++] = v;
		decode(line[0], buf, n);
	}
	return 0;
}
