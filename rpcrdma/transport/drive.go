package transport

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"ipoibcm/rpcrdma"
	"ipoibcm/verbs"
)

// complete handles completions until the completion queue is destroyed.
func (e *End) complete() {
	var wcs [32]verbs.WC
	for e.cq.Wait() == nil {
		for {
			n := e.cq.Poll(wcs[:])
			for _, wc := range wcs[:n] {
				e.completed(wc)
			}
			if n < len(wcs) {
				break
			}
		}
	}
}

func (e *End) completed(wc verbs.WC) {
	select {
	case <-e.started: // a message may arrive before Start was called
	case <-e.ctx.Done():
	}
	if wc.Status != verbs.Success {
		err := fmt.Errorf("%v: %v", wc.Opcode, wc.Status)
		if wc.Status == verbs.WRFlushError {
			err = errors.New("the connection was lost")
		}
		e.end(err)
		return
	}
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return
	}
	var ev rpcrdma.Event
	if wc.ID&recvMark != 0 {
		slot := wc.ID &^ recvMark
		in := e.scratch[:copy(e.scratch, e.recv.Buf[int(slot)*e.recvSize:][:wc.ByteLen])]
		_ = e.postRecv(slot) // its error is ignored: a later completion reports the failure
		ev = rpcrdma.Recv{Data: in, WithInv: wc.Flags&verbs.WithInv != 0, Invalidated: wc.Imm}
	} else {
		ev = e.sent(wc.ID)
	}
	if ev != nil {
		e.apply(ev)
	}
	e.mu.Unlock()
}

// sent handles the completion of a work request of the send queue. It returns the event that this
// causes, if any.
func (e *End) sent(id uint64) (ev rpcrdma.Event) {
	w := e.work[id]
	delete(e.work, id)
	e.inFlight--
	switch {
	case w.buffer:
		e.free = append(e.free, w.region)
	case w.read != nil:
		r := w.read
		if r.left--; r.left == 0 {
			delete(e.reads, r.id)
			ev = rpcrdma.ReadDone{Read: r.id, Data: r.region.Buf}
			_ = e.opt.Provider.Deregister(r.region) // its octets stay
		}
	case w.region != nil:
		e.held -= w.held
		_ = e.opt.Provider.Deregister(w.region)
	}
	e.post()
	return ev
}

// step applies ev with mu locked.
func (e *End) step(ev rpcrdma.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.apply(ev)
}

// apply passes ev to the machine, then every event that the machine's actions cause. mu is held.
func (e *End) apply(ev rpcrdma.Event) {
	e.events.Add(ev)
	if !e.events.Run(e.carryOut) {
		return
	}
	e.post()
	if e.timer != nil && !e.closed {
		wait := time.Hour
		if at := e.machine.Deadline(); !at.IsZero() {
			wait = max(0, time.Until(at))
		}
		e.timer.Reset(wait)
	}
}

// carryOut gives the machine one event and carries out the actions that it returns.
func (e *End) carryOut(ev rpcrdma.Event) {
	for _, a := range e.machine.Step(nil, time.Now(), ev) {
		e.do(a)
	}
}

// do carries out one action.
func (e *End) do(a rpcrdma.Action) {
	switch a := a.(type) {
	case rpcrdma.Send:
		e.send(a)
	case rpcrdma.Register:
		e.register(a)
	case rpcrdma.Release:
		r := e.memory[a.Reg]
		delete(e.memory, a.Reg)
		if r == nil {
			return
		}
		if err := e.opt.Provider.Deregister(r); err != nil && a.Invalidated != r.RKey {
			e.exposed(a.Reg, err)
		}
	case rpcrdma.Read:
		e.read(a)
	case rpcrdma.Write:
		e.write(a)
	case rpcrdma.Serve:
		e.serve(a)
	case rpcrdma.Done:
		answer := e.calls[a.ID]
		delete(e.calls, a.ID)
		if answer == nil {
			return
		}
		a.Payload = bytes.Clone(a.Payload)
		results := make([][]byte, len(a.Results))
		for i, r := range a.Results {
			results[i] = bytes.Clone(r)
		}
		a.Results = results
		if a.Option != nil {
			a.Option = &rpcrdma.Option{Type: a.Option.Type, Info: bytes.Clone(a.Option.Info)}
		}
		answer <- a
	case rpcrdma.Ready:
		if !e.told {
			e.told = true
			close(e.ready)
		}
	case rpcrdma.Learned:
		e.opt.Versions.learn(e.opt.Peer, a)
	case rpcrdma.Close:
		go e.end(a.Err) // end locks mu, which is held here
	}
}

// exposed stops the queue pair because memory could not be deregistered. The actions behind the
// Release end the call, and no peer may reach the memory of a call that has ended (RFC 8166 section
// 4.5.4).
func (e *End) exposed(reg rpcrdma.RegID, err error) {
	e.cancel(fmt.Errorf("memory could not be taken back: %w", err))
	_ = e.qp.Modify(verbs.QPAttr{State: verbs.StateError}) // gone already is as good
	e.events.Add(rpcrdma.ReleaseFailed{Reg: reg})
}

func (e *End) send(a rpcrdma.Send) {
	var r *verbs.Region
	buffer := len(e.free) > 0 && len(a.Data) <= len(e.free[len(e.free)-1].Buf)
	if buffer {
		r = e.free[len(e.free)-1]
		e.free = e.free[:len(e.free)-1]
	} else { // more messages than there are credits: ERRORs that answer malformed messages
		var err error
		if r, err = e.opt.Provider.Alloc(len(a.Data)); err != nil {
			e.fail(fmt.Errorf("no memory for a message: %w", err))
			return
		}
	}
	n := copy(r.Buf, a.Data)
	wr := verbs.SendWR{Opcode: verbs.Send, SG: []verbs.SGE{{Region: r, Buf: r.Buf[:n]}}}
	if a.WithInv {
		wr.Opcode, wr.InvKey = verbs.SendInv, a.Invalidate
	}
	e.enqueue(wr, work{region: r, buffer: buffer})
}

// ErrDeaf is the error of a peer that goes on sending requests but does not take our answers.
var ErrDeaf = errors.New("the peer takes nothing of what it asks for")

// enqueue puts a work request behind all others. It ends the connection if already e.most wait, as
// many as the messages of all credits can cause. That happens only if the peer goes on sending and
// takes no answer.
func (e *End) enqueue(wr verbs.SendWR, w work) {
	if len(e.queue) >= e.most {
		if w.region != nil {
			_ = e.opt.Provider.Deregister(w.region)
		}
		e.fail(ErrDeaf)
		return
	}
	e.lastWR++
	wr.ID, wr.Flags = e.lastWR, verbs.Signaled
	e.work[wr.ID] = w
	e.queue = append(e.queue, wr)
}

// post posts as much of the queue as the send queue has room for.
func (e *End) post() {
	n := min(len(e.queue), e.depth-e.inFlight)
	if n <= 0 || e.closed || e.failed {
		return
	}
	took, err := e.qp.PostSend(e.queue[:n])
	e.inFlight += took
	e.queue = e.queue[took:]
	if err != nil && !errors.Is(err, verbs.ErrQueueFull) {
		e.fail(err)
	}
}

// fail ends the connection because an action could not be carried out. Nothing more is posted,
// because a reply behind a lost Write would say that the Write was done.
func (e *End) fail(err error) {
	e.failed = true
	go e.end(err) // end locks mu, which is held here
}

func (e *End) register(a rpcrdma.Register) {
	access, buf := verbs.RemoteWrite, make([]byte, max(1, a.Len))
	if a.Data != nil {
		access, buf = verbs.RemoteRead, bytes.Clone(a.Data)
	}
	r, err := e.opt.Provider.Register(buf, access)
	if err != nil {
		e.events.Add(rpcrdma.Registered{Reg: a.Reg, Err: err})
		return
	}
	e.memory[a.Reg] = r
	e.events.Add(rpcrdma.Registered{Reg: a.Reg, Buf: r.Buf, Invalidatable: e.opt.Provider.Caps().Inv,
		Segments: []rpcrdma.Segment{{Handle: r.RKey, Length: uint32(len(r.Buf)), Offset: r.Addr}}})
}

func (e *End) read(a rpcrdma.Read) {
	region, err := e.opt.Provider.Alloc(max(1, a.Len))
	if err != nil {
		e.events.Add(rpcrdma.ReadDone{Read: a.Read, Err: err})
		return
	}
	r := &read{id: a.Read, region: region}
	e.reads[a.Read] = r
	at := 0
	for _, s := range a.Segments {
		n := min(int(s.Length), a.Len-at)
		if n <= 0 {
			continue
		}
		r.left++
		e.enqueue(verbs.SendWR{Opcode: verbs.Read, SG: []verbs.SGE{{Region: region, Buf: region.Buf[at : at+n]}},
			RemoteAddr: s.Offset, RKey: s.Handle}, work{read: r})
		at += n
	}
	if r.left == 0 {
		delete(e.reads, a.Read)
		_ = e.opt.Provider.Deregister(region)
		e.events.Add(rpcrdma.ReadDone{Read: a.Read, Data: region.Buf[:0]})
	}
}

func (e *End) write(a rpcrdma.Write) {
	if len(a.Data) == 0 {
		return
	}
	if e.held+int64(len(a.Data)) > e.mostHeld {
		e.fail(ErrDeaf)
		return
	}
	region, err := e.opt.Provider.Alloc(len(a.Data))
	if err != nil {
		e.fail(fmt.Errorf("no memory for a reply: %w", err))
		return
	}
	rest := region.Buf[:copy(region.Buf, a.Data)]
	for _, s := range a.Segments {
		n := min(len(rest), int(s.Length))
		if n == 0 {
			continue
		}
		w := work{}
		if n == len(rest) {
			w.region, w.held = region, int64(len(a.Data)) // the last Write: the others complete before it
			e.held += w.held
		}
		e.enqueue(verbs.SendWR{Opcode: verbs.Write, SG: []verbs.SGE{{Region: region, Buf: rest[:n]}},
			RemoteAddr: s.Offset, RKey: s.Handle}, w)
		rest = rest[n:]
	}
}

// serve calls Options.Serve in a goroutine and passes the event that it returns to the machine.
func (e *End) serve(a rpcrdma.Serve) {
	if e.closed {
		return
	}
	a.Payload = bytes.Clone(a.Payload)
	if a.Option != nil {
		a.Option = &rpcrdma.Option{Type: a.Option.Type, Info: bytes.Clone(a.Option.Info)}
	}
	e.wg.Go(func() {
		ev := rpcrdma.Event(nil)
		if e.opt.Serve != nil {
			ev = e.opt.Serve(e.ctx, a)
		}
		if e.ctx.Err() != nil {
			return
		}
		switch v := ev.(type) {
		case rpcrdma.Answer:
			v.ID = a.ID
			e.step(v)
		case rpcrdma.CannotAnswer:
			v.ID = a.ID
			e.step(v)
		default:
			e.step(rpcrdma.Answer{ID: a.ID, Payload: (&rpcrdma.RPCReply{Status: rpcrdma.RPCProgUnavail}).Append(nil)})
		}
	})
}
