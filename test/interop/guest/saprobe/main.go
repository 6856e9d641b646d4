// Command saprobe asks the subnet administrator of an InfiniBand port, through ib_umad, what an
// interface needs to know: it joins the broadcast group, asks for paths, and leaves.
//
//	saprobe DEVICE [grh] GID...
//
// It prints one line for each answer and each change of state, and ends when each question has its
// answer.
package main

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"os"
	"time"

	"ipoibcm/ib"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/sa"
	wire "ipoibcm/wire/sa"
)

// patience bounds the wait for the answers, before leaving and after.
const patience = 15 * time.Second

var broadcast = ib.GID{0: 0xff, 1: 0x12, 2: 0x40, 3: 0x1b, 4: 0xff, 5: 0xff, 12: 0xff, 13: 0xff, 14: 0xff, 15: 0xff}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "saprobe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("no device")
	}
	ports := ibverbs.IBPorts(args[0])
	if len(ports) == 0 {
		return fmt.Errorf("%s has no InfiniBand port", args[0])
	}
	kernel, args := ports[0], args[1:]
	fmt.Printf("port %s LID %d SM %d GID %v P_Keys %v rate %s\n", kernel.State, kernel.LID, kernel.SMLID, kernel.GID,
		kernel.PKeys, kernel.Rate)
	port := sa.Port{Active: kernel.State == "ACTIVE", LID: kernel.LID, SMLID: kernel.SMLID, SMSL: kernel.SMSL,
		GID: kernel.GID}
	if len(args) > 0 && args[0] == "grh" {
		port.GRHRequired, args = true, args[1:]
	}
	umad, err := ibverbs.OpenSA(kernel.Device, kernel.Port, func() []ib.PKey { return kernel.PKeys })
	if err != nil {
		return err
	}
	defer umad.Close()
	p := &probe{umad: umad, client: sa.New(sa.Options{Rand: seed(), Spread: -1})}
	p.step(sa.SetPort{Port: port})
	p.step(sa.Join{MGID: broadcast, PKey: ib.DefaultPKey, State: wire.FullMember})
	p.open++
	for _, a := range args {
		g, err := ib.ParseGID(a)
		if err != nil {
			return err
		}
		p.step(sa.Query{PathKey: sa.PathKey{DGID: g, PKey: ib.DefaultPKey}})
		p.open++
	}
	if err := p.serve(); err != nil {
		return err
	}
	p.step(sa.Leave{MGID: broadcast})
	p.open++
	return p.serve()
}

func seed() mrand.Source {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return mrand.NewPCG(binary.NativeEndian.Uint64(b[:]), binary.NativeEndian.Uint64(b[8:]))
}

// A probe drives an [sa.Client] over ib_umad.
type probe struct {
	umad   *ibverbs.SAPort
	client *sa.Client
	open   int // questions without an answer
	err    error
}

func (p *probe) step(ev sa.Event) {
	for _, a := range p.client.Step(nil, time.Now(), ev) {
		switch a := a.(type) {
		case sa.SendMAD:
			to := a.MAD.Peer
			p.err = errors.Join(p.err, p.umad.SendSubnet(&ibverbs.SAMAD{LID: to.LID, SL: to.SL, QPN: to.QPN, QKey: to.QKey,
				PKey: to.PKey,
				GID:  to.GID, FlowLabel: to.FlowLabel, TrafficClass: to.TrafficClass, Data: a.MAD.Data}, a.Wait))
		case sa.StateChanged:
			fmt.Println("state", a.State)
		case sa.Joined:
			g := a.Group
			fmt.Printf("joined %v MLID %d Q_Key %v MTU %d P_Key %v rate %v\n", g.MGID, g.MLID, g.QKey, g.MTU.Octets(),
				g.PKey, g.Rate)
			p.open--
		case sa.JoinFailed:
			p.err = errors.Join(p.err, fmt.Errorf("join %v: %v, status %v", a.MGID, a.Cause, a.Status))
		case sa.Left:
			fmt.Println("left", a.MGID)
			p.open--
		case sa.PathFound:
			w := a.Path
			fmt.Printf("path %v LIDs %d %d GRH %v hops %d MTU %d\n", w.DGID, w.SLID, w.DLID, w.GRH, w.HopLimit, w.MTU.Octets())
			p.open--
		case sa.PathFailed:
			fmt.Printf("no path %v: %v\n", a.Key.DGID, a.Cause)
			p.open--
		}
	}
}

// serve drives the client until every question has its answer.
func (p *probe) serve() error {
	end := time.Now().Add(patience)
	for p.open > 0 && p.err == nil {
		next := end
		if d := p.client.Deadline(); !d.IsZero() && d.Before(next) {
			next = d
		}
		select {
		case m, ok := <-p.umad.SubnetMADs():
			if !ok {
				return errors.New("ib_umad has closed")
			}
			p.step(sa.RecvMAD{MAD: &sa.MAD{Peer: sa.Address{LID: m.LID, SL: m.SL, QPN: m.QPN, QKey: m.QKey, PKey: m.PKey,
				GID: m.GID, FlowLabel: m.FlowLabel, TrafficClass: m.TrafficClass}, Data: m.Data}})
		case <-time.After(time.Until(next)):
			if !time.Now().Before(end) {
				return fmt.Errorf("%d questions without an answer", p.open)
			}
			p.step(sa.Wake{})
		}
	}
	return p.err
}
