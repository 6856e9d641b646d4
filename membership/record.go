package membership

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"ipoibcm/ib"
)

// RecordVersion is the version of a record. A reader ignores fields that it does not know, and refuses a
// record of another version.
const RecordVersion = 1

// maxRecordLen bounds a record, in octets.
const maxRecordLen = 8192

// A record is a member as etcd keeps it.
type record struct {
	Version int      `json:"v"`
	GIDs    []string `json:"gids"`
	IPs     []string `json:"ips,omitempty"`
	QPN     string   `json:"qpn,omitempty"`
}

// AppendRecord appends the record that m publishes to b, as JSON.
func AppendRecord(b []byte, m Member) ([]byte, error) {
	r := record{Version: RecordVersion}
	for _, g := range m.GIDs {
		r.GIDs = append(r.GIDs, g.String())
	}
	for _, a := range m.IPs {
		r.IPs = append(r.IPs, a.String())
	}
	if m.QPN != 0 {
		r.QPN = m.QPN.String()
	}
	if err := m.check(); err != nil {
		return b, err
	}
	j, err := json.Marshal(r)
	return append(b, j...), err
}

// ParseRecord reads the record that member id published. by becomes its By, the place where it was found.
func ParseRecord(id, by string, b []byte) (Member, error) {
	m := Member{ID: id, By: by[:min(len(by), maxByLen)]}
	if len(b) > maxRecordLen {
		return m, fmt.Errorf("a record of %d octets, at most %d can be", len(b), maxRecordLen)
	}
	var r record
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&r); err != nil {
		return m, fmt.Errorf("no record: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return m, errors.New("more than one record")
	}
	if r.Version != RecordVersion {
		return m, fmt.Errorf("version %d of the record is not known here, only %d", r.Version, RecordVersion)
	}
	for _, s := range r.GIDs[:min(len(r.GIDs), MaxGIDs+1)] {
		g, err := ib.ParseGID(s)
		if err != nil {
			return m, err
		}
		m.GIDs = append(m.GIDs, g)
	}
	for _, s := range r.IPs[:min(len(r.IPs), MaxIPs+1)] {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return m, fmt.Errorf("ips: %w", err)
		}
		m.IPs = append(m.IPs, a)
	}
	if r.QPN != "" {
		n, err := strconv.ParseUint(r.QPN, 0, 24)
		if err != nil {
			return m, fmt.Errorf("qpn %q: want a number of 24 bits", r.QPN)
		}
		m.QPN = ib.QPN(n)
	}
	return m, m.check()
}

// maxListLen bounds a list as text, in octets.
const maxListLen = 4 << 20

// ParseList reads a list of members as a file has it: one on each line, first its name, then its GIDs, and
// any of ip=ADDRESS and qpn=NUMBER. A line with nothing but one GID is a member with that GID, which is
// also its name. ParseList skips blank lines, and what follows a #. name is the file's name, for By.
func ParseList(name string, b []byte) ([]Member, error) {
	if len(b) > maxListLen {
		return nil, fmt.Errorf("%d octets, at most %d can be", len(b), maxListLen)
	}
	var out []Member
	seen := map[string]int{}
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		m, err := parseLine(words)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if seen[m.ID] > 0 {
			return nil, fmt.Errorf("line %d: %s is on line %d already", n, m.ID, seen[m.ID])
		}
		if len(out) == MaxMembers {
			return nil, fmt.Errorf("line %d: more than %d members", n, MaxMembers)
		}
		seen[m.ID] = n
		m.By = name + ":" + strconv.Itoa(n)
		m.By = m.By[max(0, len(m.By)-maxByLen):]
		out = append(out, m)
	}
	return out, nil
}

func parseLine(words []string) (Member, error) {
	if len(words) == 1 {
		g, err := ib.ParseGID(words[0])
		if err != nil {
			return Member{}, fmt.Errorf("%q: want a GID, or a name and GIDs", words[0])
		}
		m := Member{ID: g.Addr().String(), GIDs: []ib.GID{g}}
		return m, m.check()
	}
	m := Member{ID: words[0]}
	for _, w := range words[1:] {
		key, value, isKey := strings.Cut(w, "=")
		switch {
		case isKey && key == "ip":
			a, err := netip.ParseAddr(value)
			if err != nil {
				return m, err
			}
			m.IPs = append(m.IPs, a)
		case isKey && key == "qpn":
			n, err := strconv.ParseUint(value, 0, 24)
			if err != nil {
				return m, fmt.Errorf("qpn %q: want a number of 24 bits", value)
			}
			m.QPN = ib.QPN(n)
		case isKey:
			return m, fmt.Errorf("%q: want ip= or qpn=", w)
		default:
			g, err := ib.ParseGID(w)
			if err != nil {
				return m, err
			}
			m.GIDs = append(m.GIDs, g)
		}
	}
	return m, m.check()
}
