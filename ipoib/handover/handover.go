// Package handover reads and writes what one process leaves for the next one that
// takes its interface over: who it was on the link, what it had put on the device, and
// what it knew of others.
//
// The octets come back from a service manager, and the process that wrote them may be
// of another version or have been broken: [State.UnmarshalBinary] takes nothing that
// [State.AppendBinary] could not have written, and bounds what it takes (ADR 0034).
//
// Connections are not handed over: the data path has their sequence numbers, and a new
// connection to a peer takes one round trip.
package handover

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

// Version is the version of the format. A reader refuses every other version: it would not know
// all of a newer one, and half of it might do harm.
const Version = 1

// Bounds. MaxLen and maxName are in octets.
const (
	MaxLen        = 64 << 20
	maxPrefixes   = 1024
	maxNeighbours = 100_000
	maxPeers      = 100_000
	maxName       = 255
	maxLeft       = 24 * time.Hour
)

// A State is what a process that has ended its connections hands over.
type State struct {
	Name     string // of the interface
	Underlay string // name of the underlay's device; "" for an InfiniBand port
	Link     encap.LinkAddr
	GUID     ib.GUID
	PKey     ib.PKey
	QKey     ib.QKey
	// Proven says which trial of the TUN this kernel has passed; zero means none.
	Proven   int
	Prefixes []netip.Prefix // that the process put on the device
	Memory   ipoib.Memory
}

// head holds the fields of a state that are not lists.
type head struct {
	Version  int      `json:"version"`
	Name     string   `json:"name"`
	Underlay string   `json:"underlay"`
	Link     linkAddr `json:"link"`
	GUID     uint64   `json:"guid"`
	PKey     uint16   `json:"pkey"`
	QKey     uint32   `json:"qkey"`
	Proven   uint16   `json:"proven,omitempty"`
}

// document is State as it is written.
type document struct {
	head
	Prefixes   []netip.Prefix `json:"prefixes,omitempty"`
	Neighbours []neighbour    `json:"neighbours,omitempty"`
	Peers      []peer         `json:"peers,omitempty"`
}

// unread is document as it is read: function list decodes its lists one by one.
type unread struct {
	head
	Prefixes   json.RawMessage `json:"prefixes"`
	Neighbours json.RawMessage `json:"neighbours"`
	Peers      json.RawMessage `json:"peers"`
}

// list reads a list, and refuses it as soon as it has more than most values: three octets of text
// may take a hundred octets of memory.
func list[T any](name string, text json.RawMessage, most int) (l []T, err error) {
	if len(text) == 0 {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if first, err := d.Token(); err != nil || first != json.Delim('[') {
		return nil, fmt.Errorf("malformed: %s are no list", name)
	}
	for d.More() {
		if len(l) == most {
			return nil, fmt.Errorf("%s: more than %d", name, most)
		}
		var x T
		if err := d.Decode(&x); err != nil {
			return nil, fmt.Errorf("malformed: %s: %w", name, err)
		}
		l = append(l, x)
	}
	return l, nil
}

type linkAddr struct {
	Flags uint8  `json:"flags,omitempty"`
	QPN   uint32 `json:"qpn"`
	GID   ib.GID `json:"gid"`
}

type neighbour struct {
	Addr   netip.Addr `json:"ip"`
	Link   linkAddr   `json:"link"`
	Router bool       `json:"router,omitempty"`
}

type peer struct {
	Link    linkAddr `json:"link"`
	Class   uint8    `json:"class,omitempty"`
	Legacy  bool     `json:"legacy,omitempty"`
	LeftMS  int64    `json:"left_ms,omitempty"`
	Via     uint8    `json:"via,omitempty"`
	ViaLeft int64    `json:"via_left_ms,omitempty"`
}

// AppendBinary appends s to b. It leaves out list values above a bound, and returns an error if the
// state takes more than MaxLen octets.
func (s *State) AppendBinary(b []byte) ([]byte, error) {
	d := document{head: head{Version: Version, Name: s.Name, Underlay: s.Underlay, Link: fromLink(s.Link),
		GUID: uint64(s.GUID), PKey: uint16(s.PKey),
		QKey: uint32(s.QKey), Proven: uint16(s.Proven)}, Prefixes: s.Prefixes[:min(len(s.Prefixes), maxPrefixes)]}
	for _, n := range s.Memory.Neighbours[:min(len(s.Memory.Neighbours), maxNeighbours)] {
		d.Neighbours = append(d.Neighbours, neighbour{Addr: n.Addr, Link: fromLink(n.Link), Router: n.Router})
	}
	for _, p := range s.Memory.Peers[:min(len(s.Memory.Peers), maxPeers)] {
		d.Peers = append(d.Peers, peer{Link: fromLink(p.Link), Class: uint8(p.Class), Legacy: p.Legacy,
			LeftMS: min(p.Left, maxLeft).Milliseconds(), Via: uint8(p.Via), ViaLeft: min(p.ViaLeft, maxLeft).Milliseconds()})
	}
	text, err := json.Marshal(&d)
	if err != nil {
		return b, fmt.Errorf("write state: %w", err)
	}
	if len(text) > MaxLen {
		return b, fmt.Errorf("state takes %d octets, more than %d", len(text), MaxLen)
	}
	return append(b, text...), nil
}

// UnmarshalBinary sets s from b. An error says what is wrong with b, and s is unchanged.
func (s *State) UnmarshalBinary(b []byte) error {
	if len(b) > MaxLen {
		return fmt.Errorf("%d octets, more than %d", len(b), MaxLen)
	}
	v, err := versionOf(b)
	if err != nil {
		return err
	}
	if v != Version {
		return fmt.Errorf("version %d, and this program knows %d", v, Version)
	}
	var d unread
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		return fmt.Errorf("malformed: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("malformed: something follows the state")
	}
	got, err := d.state()
	if err != nil {
		return err
	}
	*s = got
	return nil
}

// versionOf reads the version, which comes first: the rest can be judged only once the version
// is known.
func versionOf(b []byte) (int64, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	for _, want := range []json.Token{json.Delim('{'), "version"} {
		if got, err := dec.Token(); err != nil || got != want {
			return 0, errors.New("not a state of ipoibcmd")
		}
	}
	if got, err := dec.Token(); err == nil {
		if n, ok := got.(json.Number); ok {
			if v, err := n.Int64(); err == nil {
				return v, nil
			}
		}
	}
	return 0, errors.New("not a state of ipoibcmd")
}

// state returns the State of d after a check of every value.
func (d *unread) state() (s State, err error) {
	switch {
	case d.Name == "" || len(d.Name) > maxName:
		return s, fmt.Errorf("name of %d octets", len(d.Name))
	case len(d.Underlay) > maxName:
		return s, fmt.Errorf("underlay of %d octets", len(d.Underlay))
	}
	s = State{Name: d.Name, Underlay: d.Underlay, GUID: ib.GUID(d.GUID), PKey: ib.PKey(d.PKey), QKey: ib.QKey(d.QKey),
		Proven: int(d.Proven)}
	if s.Link, err = d.Link.link(); err != nil {
		return State{}, fmt.Errorf("own address: %w", err)
	}
	if s.Prefixes, err = list[netip.Prefix]("prefixes", d.Prefixes, maxPrefixes); err != nil {
		return State{}, err
	}
	neighbours, err := list[neighbour]("neighbours", d.Neighbours, maxNeighbours)
	if err != nil {
		return State{}, err
	}
	peers, err := list[peer]("peers", d.Peers, maxPeers)
	if err != nil {
		return State{}, err
	}
	for _, p := range s.Prefixes {
		if !p.IsValid() || !unicast(p.Addr()) {
			return State{}, fmt.Errorf("prefix %v is not of a host", p)
		}
	}
	for _, n := range neighbours {
		k, err := n.known()
		if err != nil {
			return State{}, fmt.Errorf("neighbour %v: %w", n.Addr, err)
		}
		s.Memory.Neighbours = append(s.Memory.Neighbours, k)
	}
	for _, p := range peers {
		k, err := p.known()
		if err != nil {
			return State{}, fmt.Errorf("peer: %w", err)
		}
		s.Memory.Peers = append(s.Memory.Peers, k)
	}
	return s, nil
}

func (n *neighbour) known() (k ipoib.KnownNeighbour, err error) {
	if !unicast(n.Addr) {
		return k, errors.New("it is no address of a host")
	}
	k = ipoib.KnownNeighbour{Addr: n.Addr, Router: n.Router}
	k.Link, err = n.Link.link()
	return k, err
}

func (p *peer) known() (k ipoib.KnownPeer, err error) {
	if k.Link, err = p.Link.link(); err != nil {
		return k, err
	}
	k = ipoib.KnownPeer{Link: k.Link, Class: ipoib.Class(p.Class), Legacy: p.Legacy, Via: ipoib.CMPath(p.Via),
		Left: time.Duration(p.LeftMS) * time.Millisecond, ViaLeft: time.Duration(p.ViaLeft) * time.Millisecond}
	for _, ms := range []int64{p.LeftMS, p.ViaLeft} {
		if ms < 0 || ms > maxLeft.Milliseconds() {
			return k, fmt.Errorf("%d ms are not 0 to %d", ms, maxLeft.Milliseconds())
		}
	}
	switch {
	case k.Link.Flags != 0:
		return k, fmt.Errorf("flags %v of a peer", k.Link.Flags)
	case k.Class > ipoib.ClassLegacy:
		return k, fmt.Errorf("class %d", p.Class)
	case k.Via > ipoib.ViaInband:
		return k, fmt.Errorf("path %d of CM messages", p.Via)
	case k.Legacy && k.Via == ipoib.ViaInband:
		return k, errors.New("a legacy peer has messages in-band")
	}
	return k, nil
}

func fromLink(l encap.LinkAddr) linkAddr {
	return linkAddr{Flags: uint8(l.Flags), QPN: uint32(l.QPN), GID: l.GID}
}

// link returns the address, or an error if no interface can have it.
func (l *linkAddr) link() (encap.LinkAddr, error) {
	a := encap.LinkAddr{Flags: encap.Flags(l.Flags), QPN: ib.QPN(l.QPN), GID: l.GID}
	switch {
	case a.Flags != a.Flags.Known():
		return a, fmt.Errorf("flags 0x%02x", l.Flags)
	case a.QPN <= ib.QPNGSI || a.QPN >= ib.QPNMulticast:
		return a, fmt.Errorf("QPN 0x%x is no queue pair's", l.QPN)
	case a.GID.IsZero() || a.GID.IsMulticast():
		return a, fmt.Errorf("GID %v is no host's", a.GID)
	}
	return a, nil
}

// unicast reports whether a is an address that one host can have, in the form that the machine
// writes: without zone, and not an IPv4-mapped one.
func unicast(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback()
}
