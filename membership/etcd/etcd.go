//go:build !noetcd

package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"ipoibcm/ib"
	"ipoibcm/membership"
)

// Times of a session with the cluster.
const (
	requestWithin = 3 * time.Second         // patience for one request
	pingEvery     = 5 * time.Second         // between pings on a connection that is silent
	retryMin      = 200 * time.Millisecond  // after a failure, doubled up to retryMax
	retryMax      = time.Second             // so that a fault that ends is over within seconds
	connectWithin = 1500 * time.Millisecond // so that a SYN is sent twice
	// gather is how long we collect changes before we report a list, from the first of them: on a large link
	// there may be hundreds at once.
	gather = 20 * time.Millisecond
	// signsPerLease is how often per lease time we renew the lease and ask the watch for its
	// progress. If the watch stays silent for a whole lease time, we connect again and read the list
	// anew.
	signsPerLease = 3

	// maxAnswer bounds an answer of the cluster in octets: twice what MaxMembers records of the largest
	// size take. maxKeyLen bounds what is kept of a key.
	maxAnswer = 64 << 20
	maxKeyLen = 256
)

// A source is one link in one cluster.
type source struct {
	c   Config
	tls *tls.Config

	fault fault

	self    atomic.Pointer[membership.Member]
	changed chan struct{} // holds one token when self has changed

	lease clientv3.LeaseID // ours, which one session leaves to the next; 0: none
}

// New returns the source that c describes. It connects to nothing yet.
func New(c Config) (membership.Publisher, error) {
	if len(c.Endpoints) == 0 {
		return nil, errors.New("etcd: no endpoints")
	}
	s := &source{c: c, changed: make(chan struct{}, 1)}
	if c.TLS || c.CA != "" || c.Cert != "" {
		if err := s.readTLS(); err != nil {
			return nil, fmt.Errorf("etcd: %w", err)
		}
	}
	return s, nil
}

// readTLS reads authorities and certificate; the certificate is read again for each
// connection, because it is replaced before it expires.
func (s *source) readTLS() error {
	s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	if s.c.CA != "" {
		pem, err := os.ReadFile(s.c.CA)
		if err != nil {
			return err
		}
		s.tls.RootCAs = x509.NewCertPool()
		if !s.tls.RootCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("%s has no certificate", s.c.CA)
		}
	}
	if s.c.Cert == "" {
		return nil
	}
	first, err := tls.LoadX509KeyPair(s.c.Cert, s.c.Key)
	if err != nil {
		return err
	}
	log := cmp.Or(s.c.Log, slog.New(slog.DiscardHandler))
	var failed atomic.Bool // the last time that it was read
	s.tls.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		now, err := tls.LoadX509KeyPair(s.c.Cert, s.c.Key)
		again := failed.Swap(err != nil)
		if err == nil {
			return &now, nil
		}
		if !again {
			log.Warn("members: the certificate cannot be read again, the first one is used", "err", err)
		}
		return &first, nil // half replaced, or not to be read any more
	}
	return nil
}

// Name is the source as a URL, without user and password.
func (s *source) Name() string {
	scheme := "etcd://"
	if s.tls != nil {
		scheme = "etcds://"
	}
	return scheme + strings.Join(s.c.Endpoints, ",")
}

// Publish replaces the record of us that others find.
func (s *source) Publish(m membership.Member) {
	m.ID = s.c.ID
	s.self.Store(&m)
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// published returns the record of us that others are to find, nil if there is none.
func (s *source) published() *membership.Member {
	if s.c.ID == "" {
		return nil
	}
	return s.self.Load()
}

// Run reads and watches the list, and keeps our key, until ctx ends. Then it removes the key.
func (s *source) Run(ctx context.Context, tell func(membership.Event)) {
	defer func() {
		if s.lease != 0 { // ctx ended while there was no session
			_ = s.connect(ctx, tell)
		}
	}()
	wait := retryMin
	for ctx.Err() == nil {
		began := time.Now()
		err := s.connect(ctx, tell)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > s.c.lease() {
			wait = retryMin
		}
		if !errors.Is(err, errAgain) {
			tell(membership.Failed{Err: s.short(err)})
		}
		select {
		case <-time.After(wait/2 + rand.N(wait)):
		case <-ctx.Done():
		}
		wait = min(2*wait, retryMax)
	}
}

// errAgain ends a session only to read the list again. It is not reported to users as a failure.
var errAgain = errors.New("the list is read again")

// short shortens err for users: it leaves out what gRPC wraps around an error, and adds the fault to a
// timeout.
func (s *source) short(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		if fault := s.fault.get(); fault != nil {
			return fmt.Errorf("no answer in time: %w", fault)
		}
		return errors.New("no answer in time")
	}
	text := err.Error()
	if _, after, ok := strings.Cut(text, "desc = "); ok {
		text = after
	}
	return errors.New(text[:min(len(text), 300)])
}

// connect makes a client and serves with it until something is wrong. Once ctx has ended, it only removes our
// key.
func (s *source) connect(ctx context.Context, tell func(membership.Event)) error {
	// With this, a server of the cluster that knows no leader returns an error, and the client asks another
	// server.
	ctx = clientv3.WithRequireLeader(ctx)
	// The client outlives ctx by a moment, so that leave can end our lease.
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(leaveWithin, cancel) })()
	conf := clientv3.Config{
		Endpoints: s.c.Endpoints, TLS: s.tls, Context: base, Logger: zap.NewNop(),
		MaxCallRecvMsgSize: maxAnswer,
		DialTimeout:        requestWithin, DialKeepAliveTime: pingEvery, DialKeepAliveTimeout: requestWithin,
		PermitWithoutStream: true,
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(s.dial), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: retryMin, Multiplier: 1.6, Jitter: 0.2, MaxDelay: retryMax},
			MinConnectTimeout: connectWithin})},
	}
	if s.tls != nil {
		conf.DialOptions = append(conf.DialOptions,
			grpc.WithTransportCredentials(handshaker{credentials.NewTLS(s.tls), &s.fault}))
	}
	if s.c.User != "" {
		password, err := s.c.Password()
		if err != nil {
			return err
		}
		conf.Username, conf.Password = s.c.User, password
	}
	client, err := clientv3.New(conf)
	if err != nil {
		return err
	}
	defer client.Close()
	v := &session{source: s, client: client, tell: tell, members: map[string]membership.Member{}, bad: map[string]error{}}
	return v.serve(ctx)
}

// A session is the work of one client, from its connection until something is wrong.
type session struct {
	*source
	client *clientv3.Client
	tell   func(membership.Event)

	members  map[string]membership.Member // MaxMembers and one more, at most, and our own
	leftOut  bool                         // the cluster has more members than are kept
	bad      map[string]error
	revision int64

	put *membership.Member // our record, which this session put under our lease; nil: none
}

// serve reads the list, then follows it. At the end of ctx it takes our key away, whatever has ended first:
// the watch ends with ctx too.
func (v *session) serve(ctx context.Context) error {
	defer func() {
		if ctx.Err() != nil {
			v.leave()
		}
	}()
	if err := v.list(ctx); err != nil {
		return err
	}
	watch := v.client.Watch(ctx, v.c.Prefix(), clientv3.WithPrefix(), clientv3.WithRev(v.revision+1),
		clientv3.WithCreatedNotify())
	v.report(v.publish(ctx))
	sign := time.Tick(v.c.lease() / signsPerLease)
	var batch <-chan time.Time // when the list is told; nil while nothing has changed
	heard := time.Now()
	for {
		select {
		case r, ok := <-watch:
			if !ok {
				return errors.New("the watch has ended")
			}
			if err := r.Err(); err != nil {
				if r.CompactRevision != 0 {
					return errAgain
				}
				return err
			}
			if r.Header.Revision < v.revision {
				return errAgain // the cluster was restored from a snapshot, and knows less than we do
			}
			heard = time.Now()
			if len(r.Events) == 0 { // the watch lives
				v.tell(membership.Current{})
				continue
			}
			gone, again := v.events(r.Events)
			if again {
				return errAgain
			}
			v.revision = r.Header.Revision
			if batch == nil { // changes that keep coming do not put it off
				batch = time.After(gather)
			}
			if gone && v.lost() { // our lease has ended
				v.report(v.publish(ctx))
			}
		case <-batch:
			batch = nil
			v.tellList()
		case <-v.changed:
			v.report(v.publish(ctx))
		case <-sign:
			if time.Since(heard) > v.c.lease() {
				return fmt.Errorf("no sign of life of the watch for %v", time.Since(heard).Round(time.Second))
			}
			v.report(v.renew(ctx))
			within, cancel := context.WithTimeout(ctx, requestWithin)
			_ = v.client.RequestProgress(within) // the answer comes by the watch, or none does
			cancel()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// report passes the outcome of publish or renew to the user: others find our key, or err is the reason why
// not. An error does not end the watch of the list.
func (v *session) report(err error) {
	if err == nil {
		if v.put != nil {
			v.tell(membership.Published{})
		}
		return
	}
	var name nameError
	if !errors.As(err, &name) {
		err = v.short(err)
		v.tell(membership.Failed{Err: err})
	}
	v.tell(membership.Published{Err: err})
}

// A nameError says that another host has our name.
type nameError struct{ error }

// list reads all members.
func (v *session) list(ctx context.Context) error {
	within, cancel := context.WithTimeout(ctx, requestWithin)
	defer cancel()
	r, err := v.client.Get(within, v.c.Prefix(), clientv3.WithPrefix(), clientv3.WithLimit(membership.MaxMembers+1))
	if err != nil {
		return err
	}
	for _, kv := range r.Kvs {
		v.take(string(kv.Key), kv.Value)
	}
	v.leftOut = v.leftOut || r.More
	v.revision = r.Header.Revision
	v.tellList()
	return nil
}

// name returns the ID of the member to which a key belongs. It cuts a longer ID to maxKeyLen octets, which
// is still too long, so that the record is refused.
func (v *session) name(key string) string {
	id := strings.TrimPrefix(key, v.c.Prefix())
	return id[:min(len(id), maxKeyLen)]
}

// take keeps one record, within bounds: whoever may write to the cluster may write any number of records.
func (v *session) take(key string, value []byte) {
	id := v.name(key)
	m, err := membership.ParseRecord(id, key, value)
	delete(v.bad, id)
	if err != nil {
		delete(v.members, id)
		if len(v.bad) < membership.MaxMembers {
			v.bad[id] = err
		}
		return
	}
	// One member more than there can be is kept, so that the excess shows. Our own is always kept,
	// because lost looks for it.
	if _, known := v.members[id]; !known && id != v.c.ID && len(v.members) > membership.MaxMembers {
		v.leftOut = true
		return
	}
	v.members[id] = m
}

// events applies changes of the list. gone reports whether our key was deleted. again reports whether the
// list has to be read again, because members that were left out fit now.
func (v *session) events(evs []*clientv3.Event) (gone, again bool) {
	for _, e := range evs {
		key := string(e.Kv.Key)
		if e.Type == clientv3.EventTypeDelete {
			id := v.name(key)
			delete(v.members, id)
			delete(v.bad, id)
			gone = gone || id == v.c.ID
			continue
		}
		v.take(key, e.Kv.Value)
	}
	return gone, v.leftOut && len(v.members) < membership.MaxMembers
}

func (v *session) tellList() {
	l := membership.Listed{Revision: uint64(v.revision), Members: slices.Collect(maps.Values(v.members))}
	for id, err := range v.bad {
		l.Bad = append(l.Bad, membership.Bad{ID: id, Err: err})
	}
	slices.SortFunc(l.Bad, func(a, b membership.Bad) int { return strings.Compare(a.ID, b.ID) })
	v.tell(l)
}

// publish puts our record under our key, unless the same record is there already.
func (v *session) publish(ctx context.Context) error {
	m := v.published()
	if m == nil || v.put != nil && v.put.Equal(m) {
		return nil
	}
	record, err := membership.AppendRecord(nil, *m)
	if err != nil {
		return err
	}
	within, cancel := context.WithTimeout(ctx, requestWithin)
	defer cancel()
	err = v.claim(within, m, string(record))
	if errors.Is(err, rpctypes.ErrLeaseNotFound) { // the lease has ended
		v.lease = 0
		err = v.claim(within, m, string(record))
	}
	if err == nil {
		v.put = m
	}
	return err
}

// lost reports whether our published key has been deleted, and if so notes that nothing is published.
func (v *session) lost() bool {
	if _, there := v.members[v.c.ID]; v.put == nil || there {
		return false
	}
	v.put = nil
	return true
}

// claim puts our record under our key with our lease. It does so if nobody has the key, if the key is under
// our lease, if its record has one of our GIDs, as after a restart, or if its record cannot be read. Any
// other holder may be alive: it keeps the name until its lease ends, and claim returns a nameError.
func (v *session) claim(ctx context.Context, m *membership.Member, record string) error {
	if v.lease == 0 {
		l, err := v.client.Grant(ctx, int64(v.c.lease()/time.Second))
		if err != nil {
			return err
		}
		v.lease = l.ID
	} else if _, err := v.client.KeepAliveOnce(ctx, v.lease); err != nil { // a former session's may end soon
		return err
	}
	key := v.c.Prefix() + v.c.ID
	put := clientv3.OpPut(key, record, clientv3.WithLease(v.lease))
	r, err := v.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(put).
		Else(clientv3.OpGet(key)).Commit()
	if err != nil || r.Succeeded {
		return err
	}
	kvs := r.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return errors.New("our key came and went; it is tried again")
	}
	old, err := membership.ParseRecord(v.c.ID, key, kvs[0].Value)
	if clientv3.LeaseID(kvs[0].Lease) != v.lease && err == nil &&
		!slices.ContainsFunc(old.GIDs, func(g ib.GID) bool { return slices.Contains(m.GIDs, g) }) {
		return nameError{fmt.Errorf("another host, with GID %v, has the name %s: give one of the two another "+
			"member_id", old.GIDs[0], v.c.ID)}
	}
	r, err = v.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kvs[0].ModRevision)).Then(put).Commit()
	if err == nil && !r.Succeeded {
		err = errors.New("our key changed meanwhile; it is tried again")
	}
	return err
}

// renew renews our lease. If the lease has ended, or our key has been deleted, it publishes our record
// again, under a new lease if needed.
func (v *session) renew(ctx context.Context) error {
	if v.lost() || v.lease == 0 || v.put == nil {
		return v.publish(ctx)
	}
	within, cancel := context.WithTimeout(ctx, requestWithin)
	defer cancel()
	_, err := v.client.KeepAliveOnce(within, v.lease)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		v.lease, v.put = 0, nil
		return v.publish(ctx)
	}
	return err
}

// leave ends our lease, and our key with it, so that the others need not wait for the lease to run out. It
// tries that once.
func (v *session) leave() {
	if v.lease == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveWithin)
	defer cancel()
	_, _ = v.client.Revoke(ctx, v.lease)
	v.lease = 0
}

// leaveWithin bounds the time that leave takes.
const leaveWithin = 500 * time.Millisecond
