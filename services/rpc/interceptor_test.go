package rpc

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// sessions knows one token of a member.
type sessions struct {
	mu      sync.Mutex
	token   fleet.Token
	user    fleet.User
	hash    []byte
	touched []string
	onAsk   func()
	failing error
}

func (s *sessions) TokenByHash(_ context.Context, hash []byte, _ time.Time) (fleet.Token, fleet.User, error) {
	s.mu.Lock()
	ask := s.onAsk
	s.mu.Unlock()
	if ask != nil {
		ask()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.failing != nil:
		return fleet.Token{}, fleet.User{}, s.failing
	case !bytes.Equal(hash, s.hash) || !s.token.RevokedAt.IsZero():
		return fleet.Token{}, fleet.User{}, fleet.Errorf(fleet.KindUnauthenticated, "run `carrel login`")
	}
	return s.token, s.user, nil
}

func (s *sessions) TouchToken(_ context.Context, id string, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.touched = append(s.touched, id)
	s.token.LastUsedAt = now
	return nil
}

// lines is a log that several goroutines write.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

type gateRig struct {
	gate     *Gate
	sessions *sessions
	log      *lines
	token    string
	url      string
	client   *http.Client
}

const (
	unaryProcedure  = "/carrel.v1.AuthService/WhoAmI"
	streamProcedure = "/carrel.v1.WorkspaceService/Watch"
	adminProcedure  = "/carrel.v1.UserService/Add"
	openProcedure   = "/carrel.v1.AuthService/ServerInfo"
)

// newGate serves four procedures behind a gate; unary and stream are what their handlers do.
func newGate(t *testing.T, now func() time.Time, unary func(context.Context) error, stream func(context.Context, func() error) error) *gateRig {
	t.Helper()
	secret := auth.NewToken()
	s := &sessions{token: fleet.Token{ID: "t1", User: "u1"}, user: fleet.User{ID: "u1", Name: "ana", Role: fleet.RoleMember}, hash: secret.Hash}
	r := &gateRig{sessions: s, log: &lines{}, token: secret.Text}
	r.gate = NewGate(s, now, slog.New(slog.NewTextHandler(r.log, nil)))
	mux := http.NewServeMux()
	for _, procedure := range []string{unaryProcedure, adminProcedure, openProcedure, "/carrel.v1.AuthService/Forgotten"} {
		mux.Handle(procedure, connect.NewUnaryHandler(procedure, func(ctx context.Context, _ *connect.Request[emptypb.Empty]) (*connect.Response[emptypb.Empty], error) {
			return connect.NewResponse(&emptypb.Empty{}), unary(ctx)
		}, connect.WithInterceptors(r.gate)))
	}
	mux.Handle(streamProcedure, connect.NewServerStreamHandler(streamProcedure, func(ctx context.Context, _ *connect.Request[emptypb.Empty], out *connect.ServerStream[emptypb.Empty]) error {
		return stream(ctx, func() error { return out.Send(&emptypb.Empty{}) })
	}, connect.WithInterceptors(r.gate)))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	r.url, r.client = server.URL, server.Client()
	return r
}

func (r *gateRig) unary(t *testing.T, procedure, header string) error {
	t.Helper()
	req := connect.NewRequest(&emptypb.Empty{})
	if header != "" {
		req.Header().Set("Authorization", header)
	}
	_, err := connect.NewClient[emptypb.Empty, emptypb.Empty](r.client, r.url+procedure).CallUnary(t.Context(), req)
	return err
}

func (r *gateRig) stream(t *testing.T) (*connect.ServerStreamForClient[emptypb.Empty], error) {
	t.Helper()
	req := connect.NewRequest(&emptypb.Empty{})
	req.Header().Set("Authorization", "Bearer "+r.token)
	stream, err := connect.NewClient[emptypb.Empty, emptypb.Empty](r.client, r.url+streamProcedure).CallServerStream(t.Context(), req)
	if err == nil {
		t.Cleanup(func() { _ = stream.Close() })
	}
	return stream, err
}

func nothing(context.Context) error { return nil }

func noStream(context.Context, func() error) error { return nil }

func TestGateLetsInByHeaderAndPolicy(t *testing.T) {
	r := newGate(t, time.Now, nothing, noStream)
	for name, c := range map[string]struct {
		procedure, header string
		code              connect.Code
	}{
		"member":                     {unaryProcedure, "Bearer " + r.token, 0},
		"no header":                  {unaryProcedure, "", connect.CodeUnauthenticated},
		"no scheme":                  {unaryProcedure, r.token, connect.CodeUnauthenticated},
		"other scheme":               {unaryProcedure, "Basic " + r.token, connect.CodeUnauthenticated},
		"lower-case scheme":          {unaryProcedure, "bearer " + r.token, connect.CodeUnauthenticated},
		"no prefix":                  {unaryProcedure, "Bearer " + strings.TrimPrefix(r.token, auth.TokenPrefix), connect.CodeUnauthenticated},
		"longer":                     {unaryProcedure, "Bearer " + r.token + "x", connect.CodeUnauthenticated},
		"shorter":                    {unaryProcedure, "Bearer " + r.token[:len(r.token)-1], connect.CodeUnauthenticated},
		"hash as a token":            {unaryProcedure, "Bearer " + auth.TokenPrefix + base64.RawURLEncoding.EncodeToString(auth.Hash(r.token)), connect.CodeUnauthenticated},
		"admin's call by a member":   {adminProcedure, "Bearer " + r.token, connect.CodePermissionDenied},
		"public call":                {openProcedure, "", 0},
		"public call, wrong token":   {openProcedure, "Bearer carrel_x", 0},
		"procedure without an entry": {"/carrel.v1.AuthService/Forgotten", "Bearer " + r.token, connect.CodePermissionDenied},
	} {
		t.Run(name, func(t *testing.T) {
			err := r.unary(t, c.procedure, c.header)
			if (err == nil) != (c.code == 0) || (err != nil && connect.CodeOf(err) != c.code) {
				t.Errorf("got %v, want %v", err, c.code)
			}
		})
	}
}

func TestPanicsAndFaultsAreLoggedWithTheirCauseAndToldWithoutIt(t *testing.T) {
	const canary = "canary-4711"
	for name, unary := range map[string]func(context.Context) error{
		"panic":        func(context.Context) error { panic(canary) },
		"plain error":  func(context.Context) error { return errors.New(canary) },
		"hidden cause": func(context.Context) error { return fleet.Wrap(errors.New(canary), fleet.KindUnavailable, "try again") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newGate(t, time.Now, unary, noStream)
			err := r.unary(t, unaryProcedure, "Bearer "+r.token)
			if err == nil || strings.Contains(err.Error(), canary) {
				t.Errorf("client sees %v", err)
			}
			if log := r.log.String(); !strings.Contains(log, canary) || !strings.Contains(log, unaryProcedure) || strings.Contains(log, r.token) {
				t.Errorf("log: %s", log)
			}
		})
	}
	t.Run("a user's mistake is no news", func(t *testing.T) {
		r := newGate(t, time.Now, func(context.Context) error { return fleet.Errorf(fleet.KindInvalid, "no") }, noStream)
		if err := r.unary(t, unaryProcedure, "Bearer "+r.token); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Error(err)
		}
		if r.log.String() != "" {
			t.Errorf("logged: %s", r.log.String())
		}
	})
	t.Run("the store fails", func(t *testing.T) {
		r := newGate(t, time.Now, nothing, noStream)
		r.sessions.failing = errors.New(canary)
		if err := r.unary(t, unaryProcedure, "Bearer "+r.token); connect.CodeOf(err) != connect.CodeInternal || strings.Contains(err.Error(), canary) {
			t.Errorf("client sees %v", err)
		}
		if !strings.Contains(r.log.String(), canary) {
			t.Error("the cause is lost")
		}
	})
}

func TestLastUseIsNotedOnceAMinuteAndOnlyForThoseWhoAreLetIn(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := newGate(t, func() time.Time { return at }, nothing, noStream)
	calls := func(n int, procedure string) {
		for range n {
			_ = r.unary(t, procedure, "Bearer "+r.token) // the log of touches is what counts
		}
	}
	calls(3, adminProcedure)
	if len(r.sessions.touched) != 0 {
		t.Error("a call that was denied was noted")
	}
	calls(5, unaryProcedure)
	at = at.Add(59 * time.Second)
	calls(5, unaryProcedure)
	if len(r.sessions.touched) != 1 {
		t.Errorf("noted %d times within a minute", len(r.sessions.touched))
	}
	at = at.Add(time.Second)
	calls(1, unaryProcedure)
	if len(r.sessions.touched) != 2 {
		t.Errorf("noted %d times after a minute", len(r.sessions.touched))
	}
}

func TestStreamIsCutWithTheReason(t *testing.T) {
	for name, cut := range map[string]func(*Gate, error){
		"by token": func(g *Gate, reason error) { g.CloseToken("t1", reason) },
		"by user":  func(g *Gate, reason error) { g.CloseUser("u1", reason) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newGate(t, time.Now, nothing, func(ctx context.Context, send func() error) error {
				if err := send(); err != nil {
					return err
				}
				<-ctx.Done()
				return errors.New("canary: how the handler ended does not matter")
			})
			stream, err := r.stream(t)
			if err != nil || !stream.Receive() {
				t.Fatalf("stream: %v %v", err, stream.Err())
			}
			r.gate.CloseToken("t2", errors.New("another's"))
			r.gate.CloseUser("u2", errors.New("another's"))
			cut(r.gate, fleet.Errorf(fleet.KindUnauthenticated, "revoked"))
			for stream.Receive() {
				continue
			}
			if err := stream.Err(); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "revoked") {
				t.Errorf("ended with %v", err)
			}
			r.gate.calls.mu.Lock()
			defer r.gate.calls.mu.Unlock()
			if len(r.gate.calls.open) != 0 {
				t.Errorf("%d calls are still held", len(r.gate.calls.open))
			}
		})
	}
}

// A revocation that commits after the token was looked up, but before the stream could be cut, must not be lost.
func TestRevocationDuringAdmissionIsSeen(t *testing.T) {
	r := newGate(t, time.Now, nothing, func(context.Context, func() error) error { return nil })
	asked := 0
	r.sessions.onAsk = func() {
		if asked++; asked == 2 { // the gate has admitted and holds; the revocation came in between and cut nothing
			r.sessions.mu.Lock()
			r.sessions.token.RevokedAt = time.Now()
			r.sessions.mu.Unlock()
		}
	}
	stream, err := r.stream(t)
	if err == nil {
		for stream.Receive() {
			continue
		}
		err = stream.Err()
	}
	if connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("the stream of a revoked token ended with %v", err)
	}
}
