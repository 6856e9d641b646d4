package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/provider/softroce"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// Names of providers, as settings have them.
const (
	softRoCE = "softroce"
	ibVerbs  = "ibverbs"
)

// ecnModes are the values of ecn.
var ecnModes = map[string]engine.ECNMode{ecnOff: engine.ECNOff, ecnAuto: engine.ECNAuto, ecnOn: engine.ECNOn}

// Values of ecn.
const ecnOff, ecnAuto, ecnOn = "off", "auto", "on"

// openProvider opens the provider, and checks that the UD MTU fits it. The notes are what an operator
// should know about the choice.
func openProvider(ctx context.Context, s settings, threads int, before *predecessor,
	log *slog.Logger) (verbs.Provider, []string, error) {
	dev, err := s.openDevice(ctx, threads, before, log)
	if err != nil {
		return nil, nil, err
	}
	port := dev.Port()
	plan, err := s.checkUD(port)
	if err == nil {
		err = s.needIPv6(plan)
	}
	if err != nil {
		return nil, nil, errors.Join(err, dev.Close())
	}
	var notes []string
	if gid := s.gidOn(port); s.gid.IsZero() && gid.Is4() {
		notes = append(notes, "no IPv6 address on the underlay: its IPv4 address "+gid.Addr().String()+" is the GID")
	}
	return dev, notes, nil
}

func (s *settings) openDevice(ctx context.Context, threads int, before *predecessor,
	log *slog.Logger) (verbs.Provider, error) {
	if s.Provider == ibVerbs && !ibverbs.Built {
		return nil, fmt.Errorf("provider ibverbs: %w", ibverbs.ErrNotBuilt)
	}
	if s.infiniBand() {
		dev, err := ibverbs.Open(ibverbs.Options{Device: s.Device, Port: s.Port, GID: s.gid,
			NoCM: s.CMTransport == "inband", Stop: ctx.Done(), Log: log})
		if err != nil {
			return nil, fmt.Errorf("open port %d of %s: %w", s.Port, s.Device, err)
		}
		return dev, nil
	}
	link, err := hostnet.Lookup(s.Underlay)
	if err != nil {
		if errors.Is(err, hostnet.ErrNotFound) {
			err = errors.New("there is no such device")
		}
		return nil, hintError{fmt.Errorf("underlay %s: %w", s.Underlay, err), "ipoibcmd devices lists what could serve"}
	}
	if !link.Up {
		return nil, hintError{fmt.Errorf("underlay %s is down", s.Underlay), "ip link set " + s.Underlay + " up"}
	}
	var dev verbs.Provider
	if s.Provider == ibVerbs {
		dev, err = ibverbs.Open(ibverbs.Options{Underlay: s.Underlay, Device: s.Device, GID: s.gid,
			NoCM: s.CMTransport == "inband", Stop: ctx.Done(), Log: log})
	} else {
		poll := softroce.DefaultBusyPoll
		if !s.Offload.BusyPoll {
			poll = 0
		}
		before.suits(s.Underlay)
		dev, err = before.whenReleased(func() (verbs.Provider, error) {
			d, err := softroce.Open(softroce.Options{
				Underlay: s.Underlay, GID: s.gid, MaxUDPayload: s.UDMTU.most() + encap.HeaderLen,
				TrafficClass: uint8(s.Class.fixed()), ECN: ecnModes[s.ECN],
				PKeys: []ib.PKey{ib.PKey(cmp.Or(s.PKey, uint16(ib.DefaultPKey)))},
				NoGSO: !s.Offload.GSO, NoGRO: !s.Offload.GRO, HoldP: s.Offload.HoldP,
				BusyPoll: poll, NoConnect: !s.Offload.Connected, Stop: ctx.Done(), Log: log,
				Sockets: before.sockets, GUID: before.guid(), Threads: threads,
			})
			if err != nil {
				return nil, err // not a nil Device in an interface
			}
			return d, nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("open %s on %s: %w", s.Provider, s.Underlay, err)
	}
	return dev, nil
}

// whyNoQP1 returns why a provider has no QP 1, if it says so.
func whyNoQP1(p verbs.Provider) error {
	if d, ok := p.(interface{ MADError() error }); ok {
		return d.MADError()
	}
	return nil
}

// gidOn returns the GID that is used on a port: the configured one, else the port's first.
func (s *settings) gidOn(port verbs.Port) ib.GID {
	if s.gid.IsZero() && len(port.GIDs) > 0 {
		return port.GIDs[0]
	}
	return s.gid
}

// checkUD plans the UD MTU on a port. It returns an error if the port does not carry the configured UD MTU.
func (s *settings) checkUD(port verbs.Port) (mtu.UDPlan, error) {
	if port.InfiniBand { // the broadcast group has the UD MTU
		return mtu.UDPlan{MTU: int(s.UDMTU), IPv6: s.UDMTU.most() >= mtu.MinIPv6}, nil
	}
	link := mtu.Link{Underlay: port.UnderMTU, IPv4: s.gidOn(port).Is4()}
	if s.Provider == ibVerbs {
		link.Path = port.MTU // the kernel sends no datagram above it
	}
	return mtu.PlanUD(int(s.UDMTU), link)
}

// needIPv6 returns an error if an IPv6 address is configured on a link without IPv6.
func (s settings) needIPv6(plan mtu.UDPlan) error {
	for _, p := range s.prefixes {
		if p.Addr().Is6() && !plan.IPv6 {
			return fmt.Errorf(
				"address %v: there is no IPv6 on a link whose UD MTU, %d on this underlay, is below %d: raise the underlay's MTU",
				p, plan.MTU, mtu.MinIPv6)
		}
	}
	return nil
}
