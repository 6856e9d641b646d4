//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A qp is a queue pair.
//
// Locks are taken in the order mu, sendMu, recvMu. Posting holds sendMu or recvMu only.
type qp struct {
	dev            *Device
	transport      ib.Transport
	qpn            ib.QPN
	gen            uint32
	sendCQ, recvCQ *cq
	srq            *srq

	state atomic.Uint32 // the last verbs.QPState known; the kernel may have changed it
	comm  atomic.Bool   // the user has had CommEst

	mu     sync.Mutex
	h      *C.struct_ibv_qp // changed with all three locks held; nil after destroy
	groups []attached

	sendMu   sync.Mutex
	send     ring
	sendWRs  []C.struct_shim_send
	sendSGEs []C.struct_ibv_sge
	maxSGE   int
	qkey     ib.QKey
	flow     flow // for the tap, like sendPSN, recvPSN and msn
	sendPSN  ib.PSN

	recvMu  sync.Mutex
	recv    ring
	post    recvBatch
	recvPSN ib.PSN
	msn     uint32
	pkey    ib.PKey // set before the first receive
}

var _ verbs.QP = (*qp)(nil)

// Types of QPs (enum ibv_qp_type).
var qpTypes = map[ib.Transport]C.int{ib.RC: C.IBV_QPT_RC, ib.UC: C.IBV_QPT_UC, ib.UD: C.IBV_QPT_UD}

// CreateQP implements [verbs.Provider].
func (d *Device) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	if err := d.use(); err != nil {
		return nil, err
	}
	defer d.life.RUnlock()
	kind, known := qpTypes[init.Transport]
	send, ok1 := init.SendCQ.(*cq)
	recv, ok2 := init.RecvCQ.(*cq)
	switch {
	case !known:
		return nil, fmt.Errorf("%w: transport %v", verbs.ErrNotSupported, init.Transport)
	case !ok1 || !ok2 || send.dev != d || recv.dev != d:
		return nil, fmt.Errorf("%w: completion queues are not of this device", verbs.ErrInvalid)
	case max(init.SendDepth, init.RecvDepth) > d.caps.MaxQPDepth || max(init.MaxSendSGE, init.MaxRecvSGE) > d.caps.MaxSGE:
		return nil, fmt.Errorf("%w: queue pair larger than the capabilities", verbs.ErrInvalid)
	}
	q := &qp{dev: d, transport: init.Transport, sendCQ: send, recvCQ: recv, gen: d.gen.Add(1) & 0x3fffffff}
	sendDepth, recvDepth := max(1, init.SendDepth), max(1, init.RecvDepth)
	sendSGE, recvSGE := max(1, init.MaxSendSGE), max(1, init.MaxRecvSGE)
	// Polling takes a completion queue's lock before an SRQ's; so does this.
	d.create.Lock()
	defer d.create.Unlock()
	send.mu.Lock()
	defer send.mu.Unlock()
	if recv != send {
		recv.mu.Lock()
		defer recv.mu.Unlock()
	}
	if send.h == nil || recv.h == nil {
		return nil, verbs.ErrClosed
	}
	var shared *C.struct_ibv_srq
	if init.SRQ != nil {
		s, ok := init.SRQ.(*srq)
		switch {
		case !ok || s.dev != d:
			return nil, fmt.Errorf("%w: shared receive queue is not of this device", verbs.ErrInvalid)
		case init.Transport == ib.UC:
			return nil, fmt.Errorf("%w: UC has no shared receive queue", verbs.ErrNotSupported)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.h == nil {
			return nil, verbs.ErrClosed
		}
		q.srq, shared, recvSGE = s, s.h, s.maxSGE
	} else {
		q.recv, q.post = newRing(recvDepth, recvSGE), newRecvBatch(recvSGE)
	}
	q.maxSGE = sendSGE
	q.send = newRing(sendDepth, 0)
	q.sendWRs = make([]C.struct_shim_send, 0, batchLen)
	q.sendSGEs = make([]C.struct_ibv_sge, 0, batchLen*sendSGE+1)
	sendWR, recvWR := C.uint32_t(sendDepth), C.uint32_t(recvDepth)
	h, err := C.shim_create_qp(d.pd, kind, send.h, recv.h, shared, &sendWR, &recvWR, C.uint32_t(sendSGE),
		C.uint32_t(recvSGE))
	if h == nil {
		return nil, wrapErrno(fmt.Sprintf("create %v QP", init.Transport), err)
	}
	q.h, q.qpn = h, ib.QPN(h.qp_num)
	remember(d, d.qps, q.qpn, q)
	return q, nil
}

// QPN implements [verbs.QP].
func (q *qp) QPN() ib.QPN { return q.qpn }

// Transport implements [verbs.QP].
func (q *qp) Transport() ib.Transport { return q.transport }

// State implements [verbs.QP]. It asks the kernel, because a QP may go to ERR without an event.
func (q *qp) State() verbs.QPState {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.look()
}

// look returns the state, and asks the kernel whether it is ERR; q.mu is held.
func (q *qp) look() verbs.QPState {
	s := q.known()
	if q.h == nil || s == verbs.StateReset || s == verbs.StateError {
		return s
	}
	if C.shim_state(q.h) == C.IBV_QPS_ERR {
		q.died(verbs.GeneralError, "")
	}
	return q.known()
}

func (q *qp) known() verbs.QPState { return verbs.QPState(q.state.Load()) }

// Modify implements [verbs.QP].
func (q *qp) Modify(attr verbs.QPAttr) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.h == nil {
		return verbs.ErrClosed
	}
	before := q.look()
	what := fmt.Sprintf("%v QP %v to %v", q.transport, q.qpn, attr.State)
	switch {
	case attr.State == verbs.StateReset:
		if err := errno(what, C.shim_to_state(q.h, C.IBV_QPS_RESET)); err != nil {
			return err
		}
		q.sendMu.Lock()
		q.send.clear()
		q.sendMu.Unlock()
		q.recvMu.Lock()
		q.recv.clear()
		q.recvMu.Unlock()
		q.comm.Store(false)
	case attr.State == verbs.StateError:
		if before == verbs.StateReset { // from RESET the kernel goes to INIT only
			if err := errno(what, C.shim_to_init(q.h, C.int(q.dev.port), 0, 0, 0)); err != nil {
				return err
			}
		}
		// The state is set before the kernel begins to flush, so that the flushes are not taken for
		// a failure.
		q.state.Store(uint32(verbs.StateError))
		return errno(what, C.shim_to_state(q.h, C.IBV_QPS_ERR))
	case attr.State > verbs.StateError:
		return fmt.Errorf("%w: state %d", verbs.ErrInvalid, attr.State)
	case before != attr.State-1:
		return fmt.Errorf("%w: %v to %v", verbs.ErrState, before, attr.State)
	case attr.State == verbs.StateInit:
		if err := q.toInit(what, attr); err != nil {
			return err
		}
	case attr.State == verbs.StateRTR:
		if err := q.toRTR(what, attr); err != nil {
			return err
		}
	case attr.State == verbs.StateRTS:
		rc := C.shim_to_rts(q.h, C.uint32_t(attr.SQPSN&ib.PSNMask), C.int(attr.Timeout), C.int(retryCount(attr.RetryCount)),
			C.int(attr.RNRRetry), C.int(attr.MaxRDAtomic))
		if err := errno(what, rc); err != nil {
			return err
		}
		q.sendMu.Lock()
		q.sendPSN = attr.SQPSN & ib.PSNMask
		q.sendMu.Unlock()
	}
	q.state.Store(uint32(attr.State))
	return nil
}

func (q *qp) toInit(what string, attr verbs.QPAttr) error {
	index := attr.PKey.Index(q.dev.Port().PKeys)
	if index < 0 {
		return fmt.Errorf("%w: P_Key %#04x is not in the table of %s", verbs.ErrInvalid, uint16(attr.PKey), q.dev.name)
	}
	if err := errno(what, C.shim_to_init(q.h, C.int(q.dev.port), C.int(index), C.uint32_t(attr.QKey),
		accessFlags(attr.Access))); err != nil {
		return err
	}
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.pkey, q.qkey = q.dev.Port().PKeys[index], attr.QKey
	q.flow = flow{transport: q.transport, qpn: q.qpn, pkey: q.pkey, hops: 64}
	return nil
}

func (q *qp) toRTR(what string, attr verbs.QPAttr) error {
	var p C.struct_shim_path
	if q.transport != ib.UD {
		path, from, err := q.dev.path(attr.Path)
		if err != nil {
			return err
		}
		p = path
		q.sendMu.Lock()
		q.flow.src, q.flow.dst, q.flow.peer, q.flow.mtu = from.gid, attr.Path.DGID, attr.DestQPN, attr.PathMTU.Octets()
		q.flow.hops, q.flow.class, q.flow.label = uint8(p.hop_limit), attr.Path.TrafficClass, attr.Path.FlowLabel&0xfffff
		q.sendMu.Unlock()
		q.recvMu.Lock()
		q.recvPSN, q.msn = attr.RQPSN&ib.PSNMask, 0
		q.recvMu.Unlock()
	}
	rc := C.shim_to_rtr(q.h, &p, C.int(attr.PathMTU), C.uint32_t(attr.DestQPN), C.uint32_t(attr.RQPSN&ib.PSNMask),
		C.int(attr.MaxDestRDAtomic), C.int(attr.MinRNRTimer))
	return errno(what, rc)
}

// PostSend implements [verbs.QP].
func (q *qp) PostSend(wrs []verbs.SendWR) (taken int, err error) {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	if q.h == nil {
		return 0, verbs.ErrClosed
	}
	if s := q.known(); s < verbs.StateRTS {
		return 0, verbs.ErrState
	}
	return inBatches(wrs, q.send.room, q.sendSome)
}

// inBatches posts wrs in parts, each of at most batchLen and at most room() requests, until post
// returns an error. If no more requests fit the queue, the error is [verbs.ErrQueueFull]. taken is
// the number of requests that post took.
func inBatches[WR any](wrs []WR, room func() int, post func([]WR) (int, error)) (taken int, err error) {
	for taken < len(wrs) && err == nil {
		free := room()
		if free == 0 {
			return taken, verbs.ErrQueueFull
		}
		var n int
		n, err = post(wrs[taken : taken+min(len(wrs)-taken, batchLen, free)])
		taken += n
	}
	return taken, err
}

// sendSome posts wrs up to the first that is invalid, and returns the error of that one.
func (q *qp) sendSome(wrs []verbs.SendWR) (taken int, err error) {
	q.sendWRs, q.sendSGEs = q.sendWRs[:0], q.sendSGEs[:0]
	n, bad := 0, error(nil)
	for ; n < len(wrs); n++ {
		if bad = q.addSend(&wrs[n]); bad != nil {
			break
		}
	}
	if n > 0 {
		taken, err = posted(C.shim_post_send(q.h, &q.sendWRs[0], C.int(n), &q.sendSGEs[:1][0]))
		q.send.unpush(n - taken)
		q.tapSent(q.dev.tap.Get(), wrs[:taken])
	}
	if err == nil {
		err = bad
	}
	return taken, err
}

// addSend checks wr and adds it to the batch.
func (q *qp) addSend(wr *verbs.SendWR) error {
	if int(wr.Opcode) >= len(wrKinds) || wr.Opcode == verbs.SendInv {
		return fmt.Errorf("%w: %v", verbs.ErrInvalid, wr.Opcode)
	}
	kind := wrKinds[wr.Opcode]
	switch {
	case q.transport == ib.RC && !kind.rc, q.transport == ib.UC && !kind.uc, q.transport == ib.UD && kind.remote:
		return fmt.Errorf("%w: %v on %v", verbs.ErrInvalid, wr.Opcode, q.transport)
	case len(wr.SG) > q.maxSGE:
		return fmt.Errorf("%w: %d gather entries, %d at most", verbs.ErrInvalid, len(wr.SG), q.maxSGE)
	}
	if err := checkSG(wr.SG); err != nil {
		return err
	}
	length := 0
	for _, s := range wr.SG {
		length += len(s.Buf)
	}
	out := C.struct_shim_send{opcode: C.uint32_t(kind.opcode), flags: C.uint32_t(sendFlags(wr.Flags)),
		remote_addr: C.uint64_t(wr.RemoteAddr), rkey: C.uint32_t(wr.RKey)}
	if kind.imm {
		out.imm = C.uint32_t(wr.Imm)
	}
	if q.transport == ib.UD {
		// rdma_rxe reports a datagram above the path MTU as sent, although it does not send it.
		if length > q.dev.state.Load().MTU.Octets() {
			return fmt.Errorf("%w: datagram of %d octets, the path MTU is %d", verbs.ErrInvalid, length,
				q.dev.state.Load().MTU.Octets())
		}
		a, _ := wr.AH.(*ah)
		if a == nil || a.dev != q.dev {
			return fmt.Errorf("%w: no address handle of this device", verbs.ErrInvalid)
		}
		if out.ah = a.handle(); out.ah == 0 {
			return verbs.ErrClosed
		}
		out.qpn, out.qkey = C.uint32_t(wr.RemoteQPN), C.uint32_t(wr.RemoteQKey)
		if wr.RemoteQKey&ib.ControlledQKey != 0 { // not every device does this itself
			out.qkey = C.uint32_t(q.qkey)
		}
	} else if length > q.dev.caps.MaxMessage {
		return fmt.Errorf("%w: message of %d octets, %d at most", verbs.ErrInvalid, length, q.dev.caps.MaxMessage)
	}
	q.sendSGEs, out.nsge = appendSG(q.sendSGEs, wr.SG)
	out.id = C.uint64_t(makeID(idSend, q.gen, q.send.push(entry{id: wr.ID, op: wr.Opcode, len: length})))
	q.sendWRs = append(q.sendWRs, out)
	return nil
}

// checkSG returns an error if an entry is not a part of its region.
func checkSG(sg []verbs.SGE) error {
	for _, s := range sg {
		if len(s.Buf) == 0 {
			continue
		}
		if s.Region == nil {
			return fmt.Errorf("%w: memory that is not registered", verbs.ErrInvalid)
		}
		off := uint64(uintptr(unsafe.Pointer(&s.Buf[0]))) - s.Region.Addr
		if off > uint64(len(s.Region.Buf)) || uint64(len(s.Buf)) > uint64(len(s.Region.Buf))-off {
			return fmt.Errorf("%w: memory outside of its region", verbs.ErrInvalid)
		}
	}
	return nil
}

// appendSG appends sg in C's form and returns how many entries it has. It leaves out empty ones: to
// some adapters length 0 means 2 GiB.
func appendSG(to []C.struct_ibv_sge, sg []verbs.SGE) ([]C.struct_ibv_sge, C.uint32_t) {
	n := C.uint32_t(0)
	for _, s := range sg {
		if len(s.Buf) > 0 {
			to = append(to, C.struct_ibv_sge{addr: C.uint64_t(uintptr(unsafe.Pointer(&s.Buf[0]))),
				length: C.uint32_t(len(s.Buf)), lkey: C.uint32_t(s.Region.LKey)})
			n++
		}
	}
	return to, n
}

// PostRecv implements [verbs.QP].
func (q *qp) PostRecv(wrs []verbs.RecvWR) (taken int, err error) {
	if q.srq != nil {
		return 0, fmt.Errorf("%w: the QP has a shared receive queue", verbs.ErrInvalid)
	}
	taken, err = q.postRecv(wrs)
	if q.known() == verbs.StateError {
		q.flush()
	}
	return taken, err
}

func (q *qp) postRecv(wrs []verbs.RecvWR) (taken int, err error) {
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if q.h == nil {
		return 0, verbs.ErrClosed
	}
	if q.known() == verbs.StateReset {
		return 0, verbs.ErrState
	}
	return inBatches(wrs, q.recv.room, q.recvSome)
}

// recvSome is sendSome for receives.
func (q *qp) recvSome(wrs []verbs.RecvWR) (taken int, err error) {
	q.post.reset()
	n, bad := 0, error(nil)
	for ; n < len(wrs); n++ {
		wr := &wrs[n]
		if bad = q.post.check(wr); bad != nil {
			break
		}
		place := q.recv.push(entry{id: wr.ID, op: verbs.Recv, sg: wr.SG})
		q.post.add(makeID(idRecv, q.gen, place), wr.SG)
	}
	if n > 0 {
		taken, err = q.post.run(q.h, nil)
		q.recv.unpush(n - taken)
	}
	if err == nil {
		err = bad
	}
	return taken, err
}

// flush makes the kernel flush the queues of a QP in ERR again. rdma_rxe does not notice receives
// that are posted in ERR, and would leave them there.
func (q *qp) flush() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.h != nil && q.known() == verbs.StateError {
		C.shim_to_state(q.h, C.IBV_QPS_ERR)
	}
}

// failed handles a completion without success. If only the send queue of a UD or UC QP has failed,
// it moves the QP back to RTS. If the QP is in ERR, or is an RC QP, which goes there, it notes ERR
// and sends the user a QPFatal event.
func (q *qp) failed(sent bool, status verbs.Status) {
	if q.known() == verbs.StateError || q.known() == verbs.StateReset {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.h == nil {
		return
	}
	if q.transport != ib.RC {
		switch s := C.shim_state(q.h); {
		case s == C.IBV_QPS_SQE && sent:
			// The completion reports what failed; the queue goes on (IBA 10.3.1). Requests behind
			// it are flushed, and find the queue pair in RTS.
			C.shim_to_state(q.h, C.IBV_QPS_RTS)
			q.dev.count.sqErrors.Add(1)
			return
		case s != C.IBV_QPS_ERR:
			return // a datagram that did not fit its buffer, or a request behind one that failed
		}
	}
	// An RC QP is in ERR, or soon will be: rdma_rxe posts the completion before it changes the state.
	// A UD or UC QP gets here only if it is in ERR.
	if q.died(status, "") {
		C.shim_to_state(q.h, C.IBV_QPS_ERR)
	}
}

// died notes that the QP is in ERR and sends the user a QPFatal event. It does not modify the kernel's
// QP. If the noted state is RESET or ERR already, it does nothing and returns false.
func (q *qp) died(status verbs.Status, text string) bool {
	for {
		s := q.state.Load()
		if verbs.QPState(s) == verbs.StateError || verbs.QPState(s) == verbs.StateReset {
			return false
		}
		if q.state.CompareAndSwap(s, uint32(verbs.StateError)) {
			q.dev.events.Tell(verbs.Event{Kind: verbs.QPFatal, QPN: q.qpn, Status: status, Text: text})
			return true
		}
	}
}

// commEst sends the user one CommEst event, for the first packet in RTR or RTS. Adapters have such an event in
// RTR only, and rdma_rxe has none, so receives call commEst too.
func (q *qp) commEst() {
	if q.transport == ib.UD || q.comm.Load() {
		return
	}
	if s := q.known(); (s == verbs.StateRTR || s == verbs.StateRTS) && !q.comm.Swap(true) {
		q.dev.events.Tell(verbs.Event{Kind: verbs.CommEst, QPN: q.qpn})
	}
}

// AttachMulticast implements [verbs.QP].
func (q *qp) AttachMulticast(mgid ib.GID) error {
	if q.transport != ib.UD || !mgid.IsMulticast() {
		return fmt.Errorf("%w: %v is no multicast group that a %v QP can have", verbs.ErrInvalid, mgid, q.transport)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.h == nil {
		return verbs.ErrClosed
	}
	if slices.Contains(q.groups, attached{mgid: mgid}) {
		return nil
	}
	if err := q.dev.groups.join(mgid); err != nil {
		return err
	}
	if err := q.attach(attached{mgid: mgid}); err != nil {
		q.dev.groups.leave(mgid)
		return err
	}
	return nil
}

// DetachMulticast implements [verbs.QP].
func (q *qp) DetachMulticast(mgid ib.GID) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	err := q.detach(attached{mgid: mgid})
	if !errors.Is(err, errNotAttached) {
		q.dev.groups.leave(mgid)
	}
	return err
}

// An attached is a group that a QP is attached to; its LID is zero on Ethernet.
type attached struct {
	mgid ib.GID
	mlid ib.LID
}

var _ verbs.GroupQP = (*qp)(nil)

// AttachGroup implements [verbs.GroupQP].
func (q *qp) AttachGroup(mgid ib.GID, mlid ib.LID) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.h == nil:
		return verbs.ErrClosed
	case q.transport != ib.UD || !mgid.IsMulticast() || mlid == 0:
		return fmt.Errorf("%w: %v at LID %#x is no group that a %v QP can have", verbs.ErrInvalid, mgid,
			uint16(mlid), q.transport)
	case slices.Contains(q.groups, attached{mgid, mlid}):
		return nil
	}
	return q.attach(attached{mgid, mlid})
}

// DetachGroup implements [verbs.GroupQP].
func (q *qp) DetachGroup(mgid ib.GID, mlid ib.LID) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.detach(attached{mgid, mlid})
}

func (q *qp) attach(g attached) error {
	raw := C.union_ibv_gid(g.mgid)
	if rc := C.ibv_attach_mcast(q.h, &raw, C.uint16_t(g.mlid)); rc != 0 {
		return errno(fmt.Sprintf("attach to %v", g.mgid), positive(rc))
	}
	q.groups = append(q.groups, g)
	return nil
}

// errNotAttached is the error of detaching from a group to which the QP is not attached.
var errNotAttached = fmt.Errorf("%w: not attached", verbs.ErrInvalid)

func (q *qp) detach(g attached) error {
	i := slices.Index(q.groups, g)
	if i < 0 {
		return fmt.Errorf("%v: %w", g.mgid, errNotAttached)
	}
	q.groups = slices.Delete(q.groups, i, i+1)
	if q.h == nil {
		return nil
	}
	raw := C.union_ibv_gid(g.mgid)
	return errno(fmt.Sprintf("detach from %v", g.mgid), positive(C.ibv_detach_mcast(q.h, &raw, C.uint16_t(g.mlid))))
}

// positive returns rc, or EIO if rc is negative.
func positive(rc C.int) C.int {
	if rc < 0 {
		return C.int(syscall.EIO)
	}
	return rc
}

// Destroy implements [verbs.QP].
func (q *qp) Destroy() error {
	d := q.dev
	d.mu.Lock()
	if d.qps[q.qpn] == q {
		delete(d.qps, q.qpn)
	}
	d.mu.Unlock()
	return q.destroy()
}

func (q *qp) destroy() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if q.h == nil {
		return verbs.ErrClosed
	}
	for _, g := range q.groups {
		raw := C.union_ibv_gid(g.mgid)
		C.ibv_detach_mcast(q.h, &raw, C.uint16_t(g.mlid))
		q.dev.groups.leave(g.mgid) // does nothing on InfiniBand
	}
	q.groups = nil
	if q.srq != nil && q.known() != verbs.StateReset {
		// ERR makes a shared receive that the QP has begun to fill complete as flushed.
		C.shim_to_state(q.h, C.IBV_QPS_ERR)
	}
	rc := C.ibv_destroy_qp(q.h)
	q.h = nil
	q.state.Store(uint32(verbs.StateError))
	return errno(fmt.Sprintf("destroy QP %v", q.qpn), positive(rc))
}

// tapSent counts PSNs and shows the tap, if there is one, the packets of wrs; sendMu is held.
func (q *qp) tapSent(tap verbs.Tap, wrs []verbs.SendWR) {
	if q.known() != verbs.StateRTS {
		return
	}
	for i := range wrs {
		wr := &wrs[i]
		length := 0
		for _, s := range wr.SG {
			length += len(s.Buf)
		}
		if tap != nil {
			f := q.flow
			if a, ok := wr.AH.(*ah); ok {
				f.src, f.dst, f.peer, f.qkey = a.from.gid, a.attr.DGID, wr.RemoteQPN, wr.RemoteQKey
				if f.qkey&ib.ControlledQKey != 0 {
					f.qkey = q.qkey
				}
			}
			f.show(tap, true, message{op: wr.Opcode, psn: q.sendPSN, imm: wr.Imm, remoteAddr: wr.RemoteAddr, rkey: wr.RKey,
				solicited: wr.Flags&verbs.Solicited != 0, payload: gather(wr.SG, length)})
		}
		n := 1
		if q.transport != ib.UD {
			n = packets(length, q.flow.mtu)
		}
		q.sendPSN = q.sendPSN.Add(n)
	}
}

// tapReceived counts PSNs and shows the tap the packets of a receive. The PSN is correct only as
// long as no packet is lost on UC, and no peer writes to our memory.
func (q *qp) tapReceived(tap verbs.Tap, wc *verbs.WC, sg []verbs.SGE) {
	length := wc.ByteLen
	if q.transport == ib.UD {
		if tap == nil || length < verbs.GRHLen {
			return
		}
		b := gather(sg, length)
		own := q.dev.Port().GIDs
		f := flow{transport: ib.UD, qpn: wc.SrcQPN, peer: q.qpn, pkey: wc.PKey, qkey: q.qkey, hops: 64}
		// An IPv6 header begins with its version 6. In front of an IPv4 header there are 20 octets
		// of anything.
		f.src, f.dst = verbs.GRHAddrs(b[:verbs.GRHLen], b[20] == 0x45 && b[0]>>4 != 6)
		if f.dst.IsMulticast() {
			f.peer = ib.QPNMulticast
		} else if !slices.Contains(own, f.dst) {
			return
		}
		f.show(tap, false, message{op: wc.Opcode, imm: wc.Imm, payload: b[verbs.GRHLen:]})
		return
	}
	q.sendMu.Lock()
	f := q.flow
	q.sendMu.Unlock()
	q.recvMu.Lock()
	n := packets(length, f.mtu)
	psn, msn := q.recvPSN, (q.msn+1)&0xffffff
	q.recvPSN, q.msn = psn.Add(n), msn
	q.recvMu.Unlock()
	if tap == nil || wc.Opcode != verbs.Recv {
		return
	}
	in := f
	in.src, in.dst, in.qpn, in.peer = f.dst, f.src, f.peer, f.qpn
	op := verbs.Send
	if wc.Flags&verbs.WithImm != 0 {
		op = verbs.SendImm
	}
	in.show(tap, false, message{op: op, psn: psn, imm: wc.Imm, payload: gather(sg, length)})
	if q.transport == ib.RC {
		f.ack(tap, true, psn.Add(n-1), msn)
	}
}
