package link

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

// Headers of an agent's connections to its gateway.
const (
	headerHost        = "Carrel-Host"
	headerNonce       = "Carrel-Nonce"
	headerProof       = "Carrel-Proof"
	headerInstance    = "Carrel-Instance" // start of the agent's process, UnixNano in decimal: of two, the later stays
	headerStreamToken = "Carrel-Stream-Token"
)

// proofPrefix begins what an agent signs to prove itself.
const proofPrefix = "carrel-link-v1\n"

// joinPrefix begins a join token.
const joinPrefix = "carrel-join."

// callTimeout bounds a call to the gateway.
const callTimeout = 15 * time.Second

// JoinToken is what `carrel host token` prints, read.
type JoinToken struct {
	Gateway string `json:"gateway"`
	Secret  string `json:"secret"`
	CA      string `json:"ca,omitempty"` // SHA-256 of the gateway's own CA in base64url; empty with a publicly trusted one
}

// ParseJoinToken reads a token.
func ParseJoinToken(text string) (JoinToken, error) {
	var t JoinToken
	body, ok := strings.CutPrefix(strings.TrimSpace(text), joinPrefix)
	if !ok {
		return t, fmt.Errorf("this is not a join token; `carrel host token` prints one that begins with %s", joinPrefix)
	}
	raw, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil || json.Unmarshal(raw, &t) != nil || t.Secret == "" {
		return JoinToken{}, errors.New("the join token is not whole; copy all of it, or print another with `carrel host token`")
	}
	return t, nil
}

// CheckGateway refuses an address to which a secret must not be sent: plain HTTP leaves this machine only where it is loopback.
func CheckGateway(address string) error {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return fmt.Errorf("the gateway's address %q is no http or https URL", address)
	}
	ip := net.ParseIP(u.Hostname())
	if u.Scheme == "http" && u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("the gateway %s speaks plain HTTP beyond this machine; give it TLS, or allow it with --dangerous-plain-http", address)
	}
	return nil
}

// Joined is an identity that a gateway gave.
type Joined struct {
	HostID string
	Name   string
	CA     []byte // PEM of the gateway's own CA; empty with a publicly trusted one
}

// Join turns a token into an identity. The gateway's certificate must come from the CA that the token names.
func Join(ctx context.Context, t JoinToken, name string, key ed25519.PublicKey, version string) (Joined, error) {
	var found *x509.Certificate
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		config.InsecureSkipVerify = true // VerifyConnection does it, against the pinned CA
		config.VerifyConnection = func(state tls.ConnectionState) (err error) {
			found, err = pinned(state, t.CA)
			return err
		}
	}
	transport := &http.Transport{TLSClientConfig: config, Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := carrelv1connect.NewHostServiceClient(&http.Client{Transport: transport, Timeout: callTimeout}, strings.TrimRight(t.Gateway, "/"))
	answer, err := client.Join(ctx, connect.NewRequest(&carrelv1.JoinRequest{Token: t.Secret, Name: name, PublicKey: key, Version: version}))
	if err != nil {
		return Joined{}, fmt.Errorf("join %s: %w", t.Gateway, err)
	}
	j := Joined{HostID: answer.Msg.GetHostId(), Name: answer.Msg.GetName()}
	if j.HostID == "" {
		return Joined{}, fmt.Errorf("join %s: the gateway gave no host id", t.Gateway)
	}
	if found != nil {
		j.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: found.Raw})
	}
	return j, nil
}

// pinned verifies a connection's certificates against the one CA in the chain that has the fingerprint.
func pinned(state tls.ConnectionState, fingerprint string) (*x509.Certificate, error) {
	want, err := base64.RawURLEncoding.DecodeString(fingerprint)
	if err != nil {
		return nil, errors.New("the join token's fingerprint is not whole")
	}
	for _, c := range state.PeerCertificates {
		sum := sha256.Sum256(c.Raw)
		if subtle.ConstantTimeCompare(sum[:], want) != 1 {
			continue
		}
		roots := x509.NewCertPool()
		roots.AddCert(c)
		_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, DNSName: state.ServerName})
		return c, err
	}
	return nil, errors.New("the gateway shows another CA than the one in the join token: somebody may be in between, or the token is of another deployment")
}

// Prover makes what an agent sends with each dial, so that the gateway knows it.
type Prover struct {
	HostID  string
	Key     ed25519.PrivateKey
	Started time.Time // of the agent's process
	Gateway string
	TLS     *tls.Config // for https; nil trusts the system's roots

	client carrelv1connect.HostServiceClient
	token  chan string // holds the present link's stream token
}

// NewProver makes a prover; key and host id are of one identity.
func NewProver(p Prover) *Prover {
	transport := &http.Transport{TLSClientConfig: p.TLS, Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true, IdleConnTimeout: callTimeout}
	p.client = carrelv1connect.NewHostServiceClient(&http.Client{Transport: transport, Timeout: callTimeout}, strings.TrimRight(p.Gateway, "/"))
	p.token = make(chan string, 1)
	p.token <- ""
	return &p
}

// Header is for [Options]: a fresh proof for a link, the link's token for a stream.
func (p *Prover) Header(ctx context.Context, path string) (http.Header, error) {
	h := http.Header{}
	h.Set(headerHost, p.HostID)
	if path == StreamPath {
		token := <-p.token
		p.token <- token
		h.Set(headerStreamToken, token)
		return h, nil
	}
	answer, err := p.client.Challenge(ctx, connect.NewRequest(&carrelv1.ChallengeRequest{HostId: p.HostID}))
	if err != nil {
		return nil, fmt.Errorf("ask for a challenge: %w", err)
	}
	nonce := answer.Msg.GetNonce()
	if len(nonce) != 32 {
		return nil, fmt.Errorf("ask for a challenge: it has %d bytes, not 32", len(nonce))
	}
	h.Set(headerNonce, base64.StdEncoding.EncodeToString(nonce))
	h.Set(headerProof, base64.StdEncoding.EncodeToString(ed25519.Sign(p.Key, append([]byte(proofPrefix+p.HostID+"\n"), nonce...))))
	h.Set(headerInstance, strconv.FormatInt(p.Started.UnixNano(), 10))
	return h, nil
}

// OnLink is for [Options]: it keeps the token of a new link.
func (p *Prover) OnLink(answer http.Header) {
	<-p.token
	p.token <- answer.Get(headerStreamToken)
}
