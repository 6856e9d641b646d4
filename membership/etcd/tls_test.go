//go:build !noetcd

package etcd

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/membership"
)

// An authority signs certificates of servers and hosts.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // its certificate
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{t: t, file: filepath.Join(t.TempDir(), name)}
	a.cert = &x509.Certificate{Subject: pkix.Name{CommonName: name}, SerialNumber: big.NewInt(1), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour)}
	a.key = a.newKey()
	a.write(a.file, a.file+".key", a.cert, a.key)
	return a
}

func (a *authority) newKey() *ecdsa.PrivateKey {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return key
}

// issue writes a certificate for 127.0.0.1 that is good for so long, and its key.
func (a *authority) issue(cert, key, name string, life time.Duration) {
	a.t.Helper()
	a.write(cert, key, &x509.Certificate{Subject: pkix.Name{CommonName: name},
		SerialNumber: big.NewInt(time.Now().UnixNano()), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(life)}, a.newKey())
}

func (a *authority) write(cert, key string, c *x509.Certificate, k *ecdsa.PrivateKey) {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der},
		key: {Type: "PRIVATE KEY", Bytes: private}} {
		// As those who replace certificates do: never half a file.
		if err := os.WriteFile(path+".new", pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			a.t.Fatal(err)
		}
	}
}

// A certificate that cannot be read again is said once, and the first one goes on.
func TestUnreadableCertificate(t *testing.T) {
	a := newAuthority(t, "ours")
	cert, key := filepath.Join(t.TempDir(), "a.pem"), filepath.Join(t.TempDir(), "a.key")
	a.issue(cert, key, "a", time.Hour)
	var log bytes.Buffer
	p, err := New(Config{Endpoints: []string{"127.0.0.1:1"}, Cert: cert, Key: key, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	read := p.(*source).tls.GetClientCertificate
	for i, tt := range []struct {
		name string
		do   func()
		want int // lines of the log so far
	}{
		{"as it was", func() {}, 0},
		{"gone", func() { os.Remove(cert) }, 1},
		{"still gone", func() {}, 1},
		{"another one", func() { a.issue(cert, key, "a", time.Hour) }, 1},
		{"gone again", func() { os.Remove(key) }, 2},
	} {
		tt.do()
		if c, err := read(nil); err != nil || c == nil || len(c.Certificate) == 0 {
			t.Errorf("%d, %s: got %v, %v, want a certificate", i, tt.name, c, err)
		}
		if got := strings.Count(log.String(), "certificate cannot be read"); got != tt.want {
			t.Errorf("%d, %s: %d lines of the log, want %d:\n%s", i, tt.name, got, tt.want, log.String())
		}
	}
}

// With TLS both sides show a certificate that the other's authority signed. A host whose certificate was
// replaced uses the new one when it connects again.
func TestTLS(t *testing.T) {
	t.Parallel() // it waits most of the time
	ours, others := newAuthority(t, "ours"), newAuthority(t, "others")
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	ours.issue(path("server.pem"), path("server.key"), "etcd", time.Hour)
	ours.issue(path("admin.pem"), path("admin.key"), "admin", time.Hour)
	pair, err := tls.LoadX509KeyPair(path("admin.pem"), path("admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ours.cert)
	text, err := os.ReadFile(ours.file)
	if err != nil || !roots.AppendCertsFromPEM(text) {
		t.Fatalf("the authority cannot be read: %v", err)
	}
	s := newServerWith(t, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
		"--cert-file", path("server.pem"), "--key-file", path("server.key"), "--trusted-ca-file", ours.file,
		"--client-cert-auth")

	config := func(id, ca string) Config {
		c := s.config(id)
		c.CA, c.Cert, c.Key = ca, path(id+".pem"), path(id+".key")
		return c
	}
	const life = 8 * time.Second
	issued := time.Now()
	ours.issue(path("a.pem"), path("a.key"), "a", life)
	a := newHost(t, config("a", ours.file), "fe80::a")
	a.want("a")

	for _, tt := range []struct {
		name string
		c    func() Config
		want string
	}{
		{"a certificate of another authority", func() Config {
			others.issue(path("b.pem"), path("b.key"), "b", time.Hour)
			return config("b", ours.file)
		}, "certificate"},
		{"no certificate", func() Config {
			c := s.config("c")
			c.CA = ours.file
			return c
		}, "certificate"},
		{"a server that another authority would have to sign", func() Config {
			ours.issue(path("d.pem"), path("d.key"), "d", time.Hour)
			return config("d", others.file)
		}, "certificate"},
	} {
		h := newHost(t, tt.c(), "fe80::b")
		got := h.until("a failure", func(s membership.Snapshot) bool { return s.Err != nil })
		if !strings.Contains(got.Err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error about a %s", tt.name, got.Err, tt.want)
		}
		if ids := names(got); ids != "" {
			t.Errorf("%s: it sees %q, want nobody", tt.name, ids)
		}
		h.end()
	}

	ours.issue(path("a.pem"), path("a.key"), "a", time.Hour)
	// The certificate must have expired by the clock of the etcd process, which tells nobody.
	time.Sleep(time.Until(issued.Add(life + 100*time.Millisecond)))
	s.kill()
	s.start()
	ours.issue(path("e.pem"), path("e.key"), "e", time.Hour)
	newHost(t, config("e", ours.file), "fe80::e").want("a e")
	a.want("a e") // by a connection of its own, with the certificate that has come
}

// Files that cannot be used are an error when the source is made.
func TestTLSFiles(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]Config{
		"an authority that is not there":     {CA: filepath.Join(dir, "none")},
		"an authority without a certificate": {CA: empty},
		"a certificate that is none":         {Cert: empty, Key: empty},
	} {
		c.Endpoints, c.Link, c.ID = []string{"127.0.0.1:1"}, "blue", "a"
		if _, err := New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
