package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"ipoibcm/rtnl"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const sizeofRuleHdr = 12 // struct fib_rule_hdr

// A ruleMsg is a policy rule, with the protocol that tells ours from others.
type ruleMsg struct {
	rtnl.Rule
	family   byte
	protocol uint8
	fields   rtnl.Fields // what must be known of a packet to see whether it matches
}

// parseRule reads the body of an RTM_NEWRULE or RTM_DELRULE.
func parseRule(b []byte) (m ruleMsg, err error) {
	if len(b) < sizeofRuleHdr {
		return m, errShort
	}
	m.family, m.Table = b[0], int(b[4])
	dstLen, srcLen, tos := int(b[1]), b[2], b[3]
	if srcLen != 0 || tos != 0 {
		m.fields = rtnl.WithSource
	}
	dst := unspecified(m.family)
	err = eachAttr(b[sizeofRuleHdr:], func(typ int, v []byte) {
		m.fields = max(m.fields, attrFields(typ))
		switch typ {
		case unix.FRA_DST:
			dst = addrOf(v)
		case unix.FRA_PRIORITY:
			m.Priority = u32(v)
		case unix.FRA_OIFNAME:
			m.OIF = unix.ByteSliceToString(v)
		case unix.FRA_TABLE:
			m.Table = u32(v)
		case unix.FRA_PROTOCOL:
			if len(v) == 1 {
				m.protocol = v[0]
			}
		}
	})
	if err != nil {
		return m, err
	}
	if !dst.IsValid() || dstLen > dst.BitLen() {
		return m, errShort
	}
	m.To = netip.PrefixFrom(dst, dstLen)
	return m, nil
}

// attrFields returns the fields of a packet that a rule with this attribute looks at. An unknown
// attribute may be a selector of a newer kernel, and counts as one of the source.
func attrFields(typ int) rtnl.Fields {
	const (
		ipProto, sports, dports    = 22, 23, 24
		sportMask, dportMask       = 28, 29
		l3mdev, protocol, fraPad   = 19, 21, 18
		suppressGroup, suppressLen = 13, 14
	)
	switch typ {
	case ipProto, sports, dports, sportMask, dportMask:
		return rtnl.WithPorts
	case unix.FRA_DST, unix.FRA_GOTO, unix.FRA_PRIORITY, unix.FRA_FLOW, suppressGroup, suppressLen,
		unix.FRA_TABLE, unix.FRA_OIFNAME, fraPad, l3mdev, protocol:
		return rtnl.DstOnly
	}
	return rtnl.WithSource
}

// appendRule appends the body of a request about a rule of ours.
func appendRule(b []byte, r rtnl.Rule) []byte {
	table := byte(0)
	if r.Table <= 255 {
		table = byte(r.Table)
	}
	b = append(b, familyOf(r.To.Addr()), byte(r.To.Bits()), 0, 0, table, 0, 0, unix.FR_ACT_TO_TBL, 0, 0, 0, 0)
	if r.To.Bits() > 0 {
		b = appendAddr(b, unix.FRA_DST, r.To.Addr())
	}
	if r.OIF != "" {
		b = appendAttr(b, unix.FRA_OIFNAME, append([]byte(r.OIF), 0))
	}
	b = appendAttr32(b, unix.FRA_PRIORITY, r.Priority)
	b = appendAttr32(b, unix.FRA_TABLE, r.Table)
	return appendAttr(b, unix.FRA_PROTOCOL, []byte{rtnl.Protocol})
}

// AddRule adds a policy rule of ours. It is no error if that rule, or somebody else's with the
// same content, is there: the kernel does not tell rules apart by their protocol.
func (d *Device) AddRule(r rtnl.Rule) error {
	r.To = r.To.Masked()
	err := d.request(unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, appendRule(nil, r))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add rule %+v: %w", r, err)
	}
	d.rulesMu.Lock()
	defer d.rulesMu.Unlock()
	d.rules[r] = true
	return nil
}

// DelRule removes a policy rule of ours. The error is ErrNotFound if it is not there.
func (d *Device) DelRule(r rtnl.Rule) error {
	r.To = r.To.Masked()
	err := d.request(unix.RTM_DELRULE, 0, appendRule(nil, r))
	d.rulesMu.Lock()
	delete(d.rules, r)
	d.rulesMu.Unlock()
	if isAbsent(err) {
		return ErrNotFound
	}
	return wrap(err, "remove rule %+v", r)
}

// madeRule reports whether r is a rule that we have made.
func (d *Device) madeRule(r rtnl.Rule) bool {
	d.rulesMu.Lock()
	defer d.rulesMu.Unlock()
	return d.rules[r]
}

// dumpRules reads the policy rules of IPv4 and IPv6.
func (d *Device) dumpRules() (rules []ruleMsg, err error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
	req.AddRawData(make([]byte, sizeofRuleHdr))
	err = d.dump(req, unix.RTM_NEWRULE, func() { rules = nil }, func(b []byte) {
		switch m, err := parseRule(b); {
		case err != nil:
			d.count.Malformed.Add(1)
		case m.family == unix.AF_INET, m.family == unix.AF_INET6: // others are of multicast forwarding
			rules = append(rules, m)
		}
	})
	return rules, wrap(err, "read rules")
}

// ruleFields returns which fields of a packet the policy rules look at. Our rules do not count: a
// lookup for packets that they concern names oif.
func (d *Device) ruleFields() (f rtnl.Fields, err error) {
	rules, err := d.dumpRules()
	for _, m := range rules {
		if m.protocol != rtnl.Protocol {
			f = max(f, m.fields)
		}
	}
	return f, err
}

// removeRules removes those rules of ours that name the device, and those that we have made.
// Unlike routes, rules outlive the device.
func (d *Device) removeRules() (removed int, err error) {
	d.rulesMu.Lock()
	made := slices.Collect(maps.Keys(d.rules))
	d.rulesMu.Unlock()
	if removed, err = removeAll(made, d.DelRule); err != nil {
		return removed, err
	}
	l, err := d.linkNow()
	if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
		return removed, ErrNotFound
	} else if err != nil {
		return removed, err
	}
	rules, err := d.dumpRules()
	if err != nil {
		return removed, err
	}
	var named []rtnl.Rule
	for _, m := range rules {
		if m.protocol == rtnl.Protocol && m.OIF == l.Attrs().Name {
			named = append(named, m.Rule)
		}
	}
	n, err := removeAll(named, d.DelRule)
	return removed + n, err
}

// sourced reports whether any device has a route that only packets of one source or DSCP take.
func (d *Device) sourced() (found bool, err error) {
	for _, family := range families {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
		err := d.dump(req, unix.RTM_NEWROUTE, func() {}, func(b []byte) { found = found || isSourced(b) })
		if err != nil {
			return false, fmt.Errorf("read routes: %w", err)
		}
	}
	return found, nil
}

// isSourced reports whether b, the body of a route message, is a route that only packets of one
// source or DSCP take. A learned path MTU is none.
func isSourced(b []byte) bool {
	return len(b) >= unix.SizeofRtMsg && (b[2] != 0 || b[3] != 0) &&
		binary.NativeEndian.Uint32(b[8:])&unix.RTM_F_CLONED == 0
}
