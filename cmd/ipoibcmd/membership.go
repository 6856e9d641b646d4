package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"ipoibcm/agent"
	"ipoibcm/doctor"
	"ipoibcm/ib"
	"ipoibcm/membership"
	"ipoibcm/membership/etcd"
	"ipoibcm/membership/source"
)

// An Etcd says how to talk to etcd. The setting membership has its endpoints.
type Etcd struct {
	CA       string `yaml:"ca"`
	Cert     string `yaml:"cert"`
	Key      string `yaml:"key"`
	User     string `yaml:"user"`
	Password string `yaml:"password_file"`
	Lease    string `yaml:"lease"`
}

// Kinds of membership.
const (
	fromStatic = "static"
	fromEtcd   = "etcd"
	fromDNS    = "dns"
	fromFile   = "file"
)

// A linkSpec says where the members of the link are found.
type linkSpec struct {
	kind      string
	endpoints []string // of etcd
	tls       bool
	name      string // of DNS
	every     time.Duration
	path      string // of the file
	id        string // our name on the link
	lease     time.Duration
}

const (
	leastLease, mostLease = 2 * time.Second, 10 * time.Minute
	leastEvery            = time.Second
	maxEndpoints          = 64
	etcdPort              = "2379"
)

// parseMembership reads the settings about members.
func (c *Config) parseMembership() (l linkSpec, err error) {
	host, _ := os.Hostname()
	l.id = cmp.Or(c.MemberID, host)
	scheme, rest, ok := strings.Cut(c.Membership, "://")
	if err := cmp.Or(
		refuse(c.Link != "" && !membership.ValidID(c.Link), "link",
			"link %q: want letters, digits and . _ - :", c.Link),
		refuse(c.MemberID != "" && !membership.ValidID(c.MemberID), "member_id",
			"member_id %q: want letters, digits and . _ - :", c.MemberID),
		refuse(ok && rest == "", "membership", "membership %q: nothing follows ://", c.Membership),
	); err != nil {
		return l, err
	}
	switch {
	case c.Membership == "" || c.Membership == fromStatic:
		l.kind = fromStatic
		return l, nil
	case len(c.Peers) > 0:
		return l, bad("peers", "peers: membership %s finds the hosts of the link; give one of the two", c.Membership)
	case c.Provider == ibVerbs:
		return l, bad("membership",
			"membership: provider ibverbs cannot receive the copies that take the place of multicast; leave it out, and "+
				"have the underlay carry multicast")
	case ok && (scheme == "etcd" || scheme == "etcds"):
		l.kind, l.tls = fromEtcd, scheme == "etcds" || c.Etcd.CA != "" || c.Etcd.Cert != ""
		err = c.parseEtcd(&l, rest)
	case ok && scheme == "dns":
		l.kind = fromDNS
		err = parseDNS(&l, rest)
	case ok && scheme == "file":
		if l.kind, l.path = fromFile, rest; !filepath.IsAbs(rest) {
			return l, bad("membership", "membership %q: want a whole path, such as file:///etc/ipoibcm/members", c.Membership)
		}
	default:
		return l, bad("membership",
			"membership %q: want etcd://HOST:2379,…, etcds://… (TLS), dns://NAME, file:///PATH or static", c.Membership)
	}
	if v := (*valueError)(nil); err != nil && !errors.As(err, &v) {
		err = bad("membership", "membership %q: %v", c.Membership, err)
	}
	return l, err
}

func (c *Config) parseEtcd(l *linkSpec, rest string) error {
	if err := cmp.Or(
		refuse(c.Link == "", "link",
			"link: etcd keeps the hosts of many links: give this one a name, the same on all of its hosts (--link NAME)"),
		refuse(!membership.ValidID(l.id), "member_id",
			"member_id: the name of this host, %q, cannot be a key: give another", l.id),
		refuse((c.Etcd.Cert == "") != (c.Etcd.Key == ""), "etcd.cert", "etcd: cert and key belong together"),
		refuse((c.Etcd.User == "") != (c.Etcd.Password == ""), "etcd.user",
			"etcd: user and password_file belong together"),
	); err != nil {
		return err
	}
	for e := range strings.SplitSeq(strings.TrimSuffix(rest, "/"), ",") {
		host, port, err := net.SplitHostPort(e)
		if err != nil { // without a port
			host, port = strings.Trim(e, "[]"), etcdPort
		}
		if n, err := strconv.ParseUint(port, 10, 16); host == "" || strings.ContainsAny(host, "/@ ") || err != nil || n == 0 {
			return fmt.Errorf("%q is no HOST:PORT", e)
		}
		l.endpoints = append(l.endpoints, net.JoinHostPort(host, port))
	}
	if len(l.endpoints) > maxEndpoints {
		return fmt.Errorf("%d endpoints, at most %d can be", len(l.endpoints), maxEndpoints)
	}
	lease, err := time.ParseDuration(c.Etcd.Lease)
	if err != nil || lease < leastLease || lease > mostLease {
		return bad("etcd.lease", "etcd.lease %q: want %v to %v", c.Etcd.Lease, leastLease, mostLease)
	}
	l.lease = lease.Round(time.Second)
	return nil
}

func parseDNS(l *linkSpec, rest string) error {
	name, query, _ := strings.Cut(rest, "?")
	q, err := url.ParseQuery(query)
	if err != nil || len(q) > 1 || len(q) == 1 && q.Get("interval") == "" {
		return errors.New("after the name only ?interval=30s can follow")
	}
	if l.name = strings.TrimSuffix(name, "/"); l.name == "" || len(l.name) > 255 || strings.ContainsAny(l.name, "/ @:,") {
		return fmt.Errorf("%q is no name of DNS", l.name)
	}
	if s := q.Get("interval"); s != "" {
		if l.every, err = time.ParseDuration(s); err != nil || l.every < leastEvery {
			return fmt.Errorf("interval %q: want a duration of %v or more", s, leastEvery)
		}
	}
	return nil
}

// source returns the source of members; nil for the static list.
func (c *Config) source(l linkSpec, log *slog.Logger) (membership.Source, error) {
	switch l.kind {
	case fromEtcd:
		e := etcd.Config{Endpoints: l.endpoints, Link: c.Link, PKey: ib.PKey(c.PKey), ID: l.id, Lease: l.lease,
			TLS: l.tls, CA: c.Etcd.CA, Cert: c.Etcd.Cert, Key: c.Etcd.Key, User: c.Etcd.User, Log: log}
		e.Password = func() (string, error) {
			b, err := os.ReadFile(c.Etcd.Password)
			return strings.TrimRight(string(b), "\r\n"), err
		}
		return etcd.New(e)
	case fromDNS:
		return &source.DNS{Host: l.name, Every: l.every}, nil
	case fromFile:
		return &source.File{Path: l.path}, nil
	}
	return nil, nil
}

// members returns how the agent finds the hosts of the link; nil for the static list. end closes what
// members has opened.
func (s *settings) members(log *slog.Logger) (m *agent.Members, end func(), err error) {
	end = func() {}
	src, err := s.source(s.link, log)
	if src == nil || err != nil {
		return nil, end, err
	}
	m = &agent.Members{Link: s.Link, Source: src, Grace: s.link.lease / 2}
	if s.link.kind == fromEtcd {
		m.ID = s.link.id
	}
	if s.StateDir == "" {
		m.Note = "the list is not kept on disk: state_dir is empty"
		return m, end, nil
	}
	store, err := source.OpenStore(s.StateDir, s.Name, s.Link+" "+src.Name())
	if err != nil {
		// Only a start while the source does not answer needs the list on disk. Without the list such a
		// start may be slow, but it works.
		m.Note = fmt.Sprintf("the list is not kept on disk: %v", err)
		log.Warn("members", "note", m.Note)
		return m, end, nil
	}
	m.Saved, _ = store.Load()
	m.Save = store.Save
	return m, func() { _ = store.Close() }, nil
}

// memberFiles returns the files that the source reads while it runs, and the TCP ports that it connects to.
func (c *Config) memberFiles(l linkSpec) (files []string, ports []uint16) {
	for _, f := range []string{l.path, c.Etcd.CA, c.Etcd.Cert, c.Etcd.Key, c.Etcd.Password} {
		if f != "" {
			files = append(files, f)
		}
	}
	for _, e := range l.endpoints {
		_, port, _ := net.SplitHostPort(e)
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && !slices.Contains(ports, uint16(n)) {
			ports = append(ports, uint16(n))
		}
	}
	if l.kind != fromStatic {
		ports = append(ports, 53) // DNS answers that do not fit a datagram
	}
	return files, ports
}

// named reports whether the source looks up names while it runs.
func (l *linkSpec) named() bool {
	return l.kind == fromDNS || slices.ContainsFunc(l.endpoints, func(e string) bool {
		_, err := netip.ParseAddrPort(e)
		return err != nil
	})
}

// askWithin is how long doctor waits for a source of members.
const askWithin = 5 * time.Second

// memberFacts asks the source of members once, and does not publish this host there.
func memberFacts(ctx context.Context, f *doctor.Facts, s settings) {
	l := s.link
	l.id = ""
	src, err := s.source(l, nil)
	if src == nil && err == nil {
		return
	}
	f.Members, f.MembersErr = s.Membership, "no answer in time"
	if err != nil {
		f.MembersErr = err.Error()
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	src.Run(ctx, func(ev membership.Event) {
		switch ev := ev.(type) {
		case membership.Listed:
			f.MemberCount, f.MembersErr = len(ev.Members), ""
		case membership.Failed:
			f.MembersErr = ev.Err.Error()
		default:
			return
		}
		cancel()
	})
}
