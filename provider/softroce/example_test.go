package softroce_test

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce"
	"ipoibcm/verbs"
)

// An end is a queue pair on a device of its own, with a page of memory.
type end struct {
	device *softroce.Device
	cq     verbs.CQ
	qp     verbs.QP
	memory *verbs.Region
}

func open(address string) (e end, err error) {
	gid, _ := ib.ParseGID(address)
	if e.device, err = softroce.Open(softroce.Options{Underlay: "lo", GID: gid}); err != nil {
		return e, err
	}
	if e.cq, err = e.device.CreateCQ(16); err != nil {
		return e, err
	}
	if e.qp, err = e.device.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: e.cq, RecvCQ: e.cq,
		SendDepth: 4, RecvDepth: 4, MaxSendSGE: 1, MaxRecvSGE: 1}); err != nil {
		return e, err
	}
	e.memory, err = e.device.Alloc(4096)
	return e, err
}

// connect moves the queue pair to RTS, as the exchange of a CM would have it.
func (e end) connect(peer end) error {
	path := verbs.AHAttr{SGID: e.device.Port().GIDs[0], DGID: peer.device.Port().GIDs[0]}
	for _, attr := range []verbs.QPAttr{
		{State: verbs.StateInit, PKey: ib.DefaultPKey},
		{State: verbs.StateRTR, Path: path, PathMTU: ib.MTU1024, DestQPN: peer.qp.QPN(), RQPSN: 1, MinRNRTimer: 1},
		{State: verbs.StateRTS, SQPSN: 1, Timeout: 14, RetryCount: 7, RNRRetry: 7},
	} {
		if err := e.qp.Modify(attr); err != nil {
			return err
		}
	}
	return nil
}

// next waits for a completion.
func (e end) next() (wc [1]verbs.WC, err error) {
	for e.cq.Poll(wc[:]) == 0 {
		if err := e.cq.Wait(); err != nil {
			return wc, err
		}
	}
	return wc, nil
}

func exchange() error {
	a, err := open("127.0.0.1")
	if err != nil {
		return err
	}
	defer a.device.Close()
	b, err := open("127.0.0.2")
	if err != nil {
		return err
	}
	defer b.device.Close()
	if err := a.connect(b); err != nil {
		return err
	}
	if err := b.connect(a); err != nil {
		return err
	}
	if _, err := b.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: []verbs.SGE{{Region: b.memory, Buf: b.memory.Buf}}}}); err != nil {
		return err
	}
	n := copy(a.memory.Buf, "hello over RoCEv2")
	if _, err := a.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled,
		SG: []verbs.SGE{{Region: a.memory, Buf: a.memory.Buf[:n]}}}}); err != nil {
		return err
	}
	got, err := b.next()
	if err != nil {
		return err
	}
	fmt.Printf("receive %d: %v, %q\n", got[0].ID, got[0].Status, b.memory.Buf[:got[0].ByteLen])
	sent, err := a.next()
	fmt.Printf("send %d: %v\n", sent[0].ID, sent[0].Status)
	return err
}

// Two devices on the loopback, and a message from one to the other over a reliable
// connection.
func Example() {
	if err := exchange(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// receive 1: success, "hello over RoCEv2"
	// send 2: success
}
