package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// certificate writes a certificate for 127.0.0.1 with its key, and returns a pool with it.
func certificate(t *testing.T, path string, serial int64) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour),
		NotAfter:    time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k})...)
	write(t, path, string(text))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

// write replaces a file, so that its time differs even on a coarse clock.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// scrapeTLS asks for the metrics and returns the status and the certificate's number.
func scrapeTLS(addr string, pool *x509.CertPool, user, password string) (status int, serial int64, err error) {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool}}}
	r, err := http.NewRequest("GET", "https://"+addr+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	if user != "" {
		r.SetBasicAuth(user, password)
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0, 0, err
	}
	resp.Body.Close()
	return resp.StatusCode, resp.TLS.PeerCertificates[0].SerialNumber.Int64(), nil
}

// The metrics go to who has the password, over TLS; another certificate and another
// password are in force as soon as the files say so, and a broken file changes nothing.
func TestMetricsGuard(t *testing.T) {
	dir := t.TempDir()
	pemFile, userFile := filepath.Join(dir, "m.pem"), filepath.Join(dir, "m.users")
	pool := certificate(t, pemFile, 1)
	write(t, userFile, "# who may read\nprom:se:cret\n")
	var log strings.Builder
	a := &Agent{opt: Options{MetricsTLS: pemFile, MetricsAuth: userFile}, log: slog.New(slog.NewTextHandler(&log, nil))}
	srv, err := a.metricsServer()
	if err != nil {
		t.Fatal(err)
	}
	srv.Handler = guarded(newUsers(userFile, a.log),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "series") }))
	l, err := listenMetrics("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.serveMetrics(ctx, srv, l) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	check := func(name string, pool *x509.CertPool, user, password string, want int, serial int64) {
		t.Helper()
		code, got, err := scrapeTLS(l.Addr().String(), pool, user, password)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if code != want {
			t.Errorf("%s: status %d, want %d", name, code, want)
		}
		if got != serial {
			t.Errorf("%s: certificate %d, want %d", name, got, serial)
		}
	}
	check("right", pool, "prom", "se:cret", 200, 1)
	check("wrong password", pool, "prom", "secret", 401, 1)
	check("unknown user", pool, "eve", "", 401, 1)
	check("nobody", pool, "", "", 401, 1)
	if _, err := http.Get("http://" + l.Addr().String() + "/metrics"); err == nil {
		if r, _ := http.Get("http://" + l.Addr().String() + "/metrics"); r.StatusCode == 200 {
			t.Error("the metrics are to be had in the clear")
		}
	}

	pool = certificate(t, pemFile, 2)
	write(t, userFile, "prom:new\n")
	check("old password", pool, "prom", "se:cret", 401, 2)
	check("new", pool, "prom", "new", 200, 2)
	write(t, pemFile, "half a certificate")
	write(t, userFile, "no colon\n")
	check("broken files", pool, "prom", "new", 200, 2)
	check("broken files again", pool, "prom", "new", 200, 2)
	if n := strings.Count(log.String(), "the old one stays in force"); n != 2 {
		t.Errorf("%d words of broken files in the log, want one for each:\n%s", n, log.String())
	}
}

// The daemon does not start with a file that guards nothing.
func TestMetricsGuardFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "no user"}, {"no password", "prom:\n", "line 1: want user:password"},
		{"no user", "# x\n:p\n", "line 2"},
		{"twice", "a:b\na:c\n", `line 2: user "a" is there twice`}, {"many", many(), "more than 64 users"},
		{"long", strings.Repeat("x", maxGuardFile+1), "more than 1048576 octets"},
	} {
		write(t, path, tt.text)
		a := &Agent{opt: Options{MetricsAuth: path}}
		if _, err := a.metricsServer(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	for _, o := range []Options{{MetricsTLS: path}, {MetricsTLS: filepath.Join(dir, "none")},
		{MetricsAuth: filepath.Join(dir, "none")}} {
		if _, err := (&Agent{opt: o}).metricsServer(); err == nil {
			t.Errorf("%+v: no error", o.MetricsTLS+o.MetricsAuth)
		}
	}
}

func many() string {
	var b strings.Builder
	for i := range maxUsers + 1 {
		b.WriteString(strings.Repeat("u", i+1) + ":p\n")
	}
	return b.String()
}

// FuzzUsers: what is read has users with names, and each may come in with some password
// only.
func FuzzUsers(f *testing.F) {
	f.Add([]byte("a:b\n# c\nd:e:f\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		users, err := parseUsers(in)
		if err != nil {
			return
		}
		if len(users) == 0 || len(users) > maxUsers {
			t.Fatalf("%d users", len(users))
		}
		for u := range users {
			r, _ := http.NewRequest("GET", "/", nil)
			r.SetBasicAuth(u, "")
			if users.permits(r) {
				t.Errorf("%q needs no password", u)
			}
		}
	})
}

// A file of the metrics that is a pipe is refused: nobody who scrapes waits for a writer.
func TestGuardFileIsAPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.users")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- newUsers(path, slog.New(slog.DiscardHandler)).open() }()
	select {
	case err := <-failed:
		if err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("error %v, want one that says: not a regular file", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for a writer")
	}
}

// A host that sends wrong passwords may try ten, and then one in eight seconds; another host is not
// kept from anything, and neither is the memory.
func TestAttempts(t *testing.T) {
	var a attempts
	now := time.Unix(1000, 0)
	tries := func(addr string, now time.Time) (n int) {
		for ; n < 50 && a.mayTry(addr, now); n++ {
			a.wrong(addr, now)
		}
		return n
	}
	if got := tries("[2001:db8::1]:4000", now); got != attemptBurst {
		t.Errorf("%d wrong passwords at once, want %d", got, attemptBurst)
	}
	if got := tries("[2001:db8::2]:4000", now); got != 0 {
		t.Errorf("%d more from another address of the subnet, want none", got)
	}
	if got := tries("192.0.2.1:4000", now); got != attemptBurst {
		t.Errorf("%d from another host, want %d", got, attemptBurst)
	}
	if got := tries("192.0.2.1:4001", now.Add(16*time.Second)); got != 2 {
		t.Errorf("%d within 16 s, want 2", got)
	}
	for i := range 4 * maxAttempters {
		tries(fmt.Sprintf("10.0.%d.%d:80", i>>8, i&255), now)
	}
	if got := len(a.hosts); got != maxAttempters {
		t.Errorf("%d hosts are told apart, want %d", got, maxAttempters)
	}
	if got := tries("10.9.0.1:80", now.Add(time.Hour)); got != attemptBurst {
		t.Errorf("%d from a new host an hour later, want %d", got, attemptBurst)
	}
	if got := len(a.hosts); got != 1 {
		t.Errorf("%d hosts are told apart an hour later, want 1", got)
	}
}

// Nobody's wrong passwords are looked at without end, and the right one neither then.
func TestMetricsGuardEnds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "m.users")
	write(t, file, "prom:secret\n")
	h := guarded(newUsers(file, nil), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	ask := func(password string) int {
		r := httptest.NewRequest("GET", "/metrics", nil)
		if password != "" {
			r.SetBasicAuth("prom", password)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	for i := range attemptBurst {
		if got := ask(""); got != 401 {
			t.Errorf("without a password: status %d, want 401", got)
		}
		if got := ask("wrong"); got != 401 {
			t.Errorf("wrong password %d: status %d, want 401", i, got)
		}
	}
	for _, password := range []string{"wrong", "secret"} {
		if got := ask(password); got != 429 {
			t.Errorf("after many: %s has status %d, want 429", password, got)
		}
	}
}
