// Package cmdriver runs the connection manager of package cm on QP 1 of a
// provider, in real time. It has no more than cm needs, and is for tests: in the
// product, package agent drives cm.
package cmdriver

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"ipoibcm/cm"
	"ipoibcm/verbs"
)

// A Driver owns a [cm.Manager].
type Driver struct {
	port verbs.MADPort
	log  func(string)

	mu      sync.Mutex
	manager *cm.Manager
	queue   []cm.Action   // for Next, oldest first
	more    chan struct{} // closed and replaced when queue grows
	wake    chan struct{} // the deadline may have changed
	stop    chan struct{}
	wg      sync.WaitGroup
	sendErr error
}

// New starts a driver for p. It calls log with the manager's notes. Close ends the
// driver; p must outlive it.
func New(p verbs.Provider, opt cm.Options, log func(string)) *Driver {
	if opt.GID.IsZero() {
		opt.GID = p.Port().GIDs[0]
	}
	opt.CAGUID, opt.Rand = p.Port().GUID, unpredictable{}
	d := &Driver{
		port: p.MADPort(), log: log, manager: cm.New(opt),
		more: make(chan struct{}), wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	d.wg.Go(d.run)
	return d
}

type unpredictable struct{}

func (unpredictable) Uint64() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// Close ends the driver. It does not tell the peers that their connections end.
func (d *Driver) Close() {
	close(d.stop)
	d.wg.Wait()
}

func (d *Driver) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case m, ok := <-d.port.MADs():
			if !ok {
				return
			}
			d.Do(cm.RecvMAD{MAD: m})
		case <-timer.C:
			d.Do(cm.Wake{})
		case <-d.wake:
		case <-d.stop:
			return
		}
		d.mu.Lock()
		deadline := d.manager.Deadline()
		d.mu.Unlock()
		timer.Stop()
		if !deadline.IsZero() {
			timer.Reset(time.Until(deadline))
		}
	}
}

// Do gives the manager an event. It carries out SendMAD, logs notes, and queues all
// other actions for Next.
func (d *Driver) Do(ev cm.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(d.queue)
	for _, a := range d.manager.Step(nil, time.Now(), ev) {
		switch a := a.(type) {
		case cm.SendMAD:
			if err := d.port.SendMAD(a.MAD); err != nil {
				d.sendErr = err
			}
		case cm.Note:
			d.log(fmt.Sprintf("cm: %v %s comm=%v remote=%v reason=%v repeat=%v %s", a.Dir, a.Message, a.LocalCommID,
				a.RemoteCommID, a.Reason, a.Repeat, a.Text))
		default:
			d.queue = append(d.queue, a)
		}
	}
	if len(d.queue) > n {
		close(d.more)
		d.more = make(chan struct{})
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// Next returns the next action that Do has queued. It waits for one until timeout.
func (d *Driver) Next(timeout time.Duration) (cm.Action, error) {
	t := time.NewTimer(timeout)
	defer t.Stop()
	for {
		d.mu.Lock()
		if len(d.queue) > 0 {
			a := d.queue[0]
			d.queue = d.queue[1:]
			d.mu.Unlock()
			return a, nil
		}
		more, err := d.more, d.sendErr
		d.mu.Unlock()
		select {
		case <-more:
		case <-t.C:
			return nil, fmt.Errorf("cm: nothing happened in %v (last error of sending: %v)", timeout, err)
		}
	}
}

// Conns lists the connections.
func (d *Driver) Conns() []cm.ConnInfo {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.manager.Conns()
}
