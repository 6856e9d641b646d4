package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"ipoibcm/control"
)

// maxDocument bounds what is read of one answer, in octets.
const maxDocument = 64 << 20

// A client asks one agent over its control socket.
type client struct {
	path string
	http http.Client
}

// clientFlags are the flags of every command that asks an agent. json is for commands whose answer is one
// document or a stream of documents.
type clientFlags struct {
	control, name string
	json          bool
}

func (f *clientFlags) bind(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.control, "control", "", "control socket (default: of --name, else the only one in "+
		control.SocketDir+")")
	cmd.Flags().StringVar(&f.name, "name", "", "interface of the agent to ask")
}

func (f *clientFlags) bindJSON(cmd *cobra.Command) {
	f.bind(cmd)
	cmd.Flags().BoolVar(&f.json, "json", false, "print JSON")
}

// open returns a client for the socket of --control, else for that of --name, else for the only one in
// control.SocketDir.
func (f *clientFlags) open() (*client, error) {
	path := f.control
	if path == "" && f.name != "" {
		path = control.SocketPath(f.name)
	}
	if path == "" {
		found, _ := filepath.Glob(filepath.Join(control.SocketDir, "*.sock"))
		switch len(found) {
		case 0:
			return nil, hintError{errors.New("no agent is running here (no socket in " + control.SocketDir + ")"),
				"start one: ipoibcmd run --underlay eth0 --address 10.0.0.1/24; or name its socket with --control"}
		case 1:
			path = found[0]
		default:
			return nil, hintError{fmt.Errorf("%d agents are running here: %s", len(found), strings.Join(found, ", ")),
				"choose one with --name or --control"}
		}
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	// Most commands ask once, and each question of the others has a client of its own.
	return &client{path, http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}, nil
}

// stream asks the agent, and returns the body of a good answer.
func (f *clientFlags) stream(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	c, err := f.open()
	if err != nil {
		return nil, err
	}
	return c.request(ctx, http.MethodGet, path, query)
}

// request sends a request and returns the body of a good answer.
func (c *client) request(ctx context.Context, method, path string, query url.Values) (io.ReadCloser, error) {
	u := url.URL{Scheme: "http", Host: "agent", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, hintError{fmt.Errorf("no agent: %s does not exist", c.path),
			"start one with ipoibcmd run, or name the right socket with --control"}
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, hintError{fmt.Errorf("no agent answers at %s", c.path),
			"it was probably killed; start it again with ipoibcmd run"}
	case errors.Is(err, os.ErrPermission):
		return nil, hintError{fmt.Errorf("not allowed to open %s", c.path),
			"become root, or a member of its control_group (usually ipoibcm)"}
	case err != nil:
		return nil, fmt.Errorf("ask the agent at %s: %w", c.path, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	var e control.Error
	if json.NewDecoder(io.LimitReader(resp.Body, 1<<16)).Decode(&e) != nil || e.Error == "" {
		e.Error = "the agent answers " + resp.Status
	}
	why := errors.New(e.Error)
	if e.Rejected {
		why = rejectedError{why}
	}
	if e.Hint != "" {
		return nil, hintError{why, e.Hint}
	}
	return nil, why
}

// A rejectedError says that another host, which the agent was to ask, answered with a REJ.
type rejectedError struct{ error }

// get asks for one document.
func (c *client) get(ctx context.Context, path string, query url.Values, v any) error {
	return c.document(ctx, http.MethodGet, path, query, v)
}

// document sends a request, and reads the document that answers it.
func (c *client) document(ctx context.Context, method, path string, query url.Values, v any) error {
	body, err := c.request(ctx, method, path, query)
	if err != nil {
		return err
	}
	defer body.Close()
	if err := json.NewDecoder(io.LimitReader(body, maxDocument)).Decode(v); err != nil {
		return fmt.Errorf("read the agent's answer: %w", err)
	}
	return nil
}
