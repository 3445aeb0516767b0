package command

import (
	"fmt"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type tokenView struct {
	ID         string  `json:"id"`
	User       string  `json:"user"`
	Label      string  `json:"label"`
	Current    bool    `json:"current"`
	CreatedAt  *moment `json:"created_at"`
	LastUsedAt *moment `json:"last_used_at,omitempty"`
	ExpiresAt  *moment `json:"expires_at,omitempty"`
}

func newToken(a *app) *cobra.Command {
	return group("token", "Signed-in machines", newTokenList(a), newTokenRevoke(a))
}

func newTokenList(a *app) *cobra.Command {
	o := listFlags{}
	var user string
	cmd := &cobra.Command{
		Use: "ls", Short: "List your tokens with their last use", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.auth.ListTokens(cmd.Context(), connect.NewRequest(&carrelv1.ListTokensRequest{User: user}))
			if err != nil {
				return err
			}
			rows := each(resp.Msg.GetTokens(), func(t *carrelv1.Token) tokenView {
				return tokenView{t.GetId(), t.GetUser(), t.GetLabel(), t.GetCurrent(), momentOf(t.GetCreatedAt()), momentOf(t.GetLastUsedAt()), momentOf(t.GetExpiresAt())}
			})
			return writeList(a, tokenList(a.sys.Now()), rows, o)
		},
	}
	a.listFlags(cmd, &o)
	cmd.Flags().StringVar(&user, "user", "", "another's (admins)")
	return cmd
}

func tokenList(now time.Time) output.List[tokenView] {
	type col = output.Column[tokenView]
	return output.List[tokenView]{
		Columns: []col{
			{Name: "id", Title: "ID", Text: func(t tokenView) string { return t.ID }},
			{Name: "user", Title: "USER", Text: func(t tokenView) string { return t.User }},
			{Name: "label", Title: "LABEL", Text: func(t tokenView) string { return t.Label }},
			{Name: "created_at", Title: "MADE", Text: func(t tokenView) string { return t.CreatedAt.stamp() }, Value: func(t tokenView) string { return t.CreatedAt.text() }},
			{Name: "last_used_at", Title: "LAST USED", Text: func(t tokenView) string {
				if t.LastUsedAt == nil {
					return "never"
				}
				return t.LastUsedAt.ago(now) + " ago"
			}, Value: func(t tokenView) string { return t.LastUsedAt.text() }},
			{Name: "expires_at", Title: "ENDS", Text: func(t tokenView) string { return orDash(t.ExpiresAt.stamp()) }, Value: func(t tokenView) string { return t.ExpiresAt.text() }},
			{Name: "current", Title: "NOTE", Text: func(t tokenView) string {
				if t.Current {
					return "this one"
				}
				return ""
			}, Value: func(t tokenView) string { return fmt.Sprint(t.Current) }},
		},
		ID:    func(t tokenView) string { return t.ID },
		Empty: "no tokens",
	}
}

func newTokenRevoke(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "revoke ID", Short: "End a token and cut its connections", Args: exactArgs("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			if _, err := api.auth.RevokeToken(cmd.Context(), connect.NewRequest(&carrelv1.RevokeTokenRequest{Id: args[0]})); err != nil {
				return err
			}
			return a.print("%s is revoked", args[0])
		},
	}
}

type keyView struct {
	ID          string  `json:"id"`
	User        string  `json:"user"`
	Label       string  `json:"label"`
	Fingerprint string  `json:"fingerprint"`
	PublicKey   string  `json:"public_key"`
	CreatedAt   *moment `json:"created_at"`
}

func viewKey(k *carrelv1.DeviceKey) keyView {
	return keyView{k.GetId(), k.GetUser(), k.GetLabel(), k.GetFingerprint(), k.GetPublicKey(), momentOf(k.GetCreatedAt())}
}

func newKey(a *app) *cobra.Command {
	return group("key", "SSH keys that open your workspaces", newKeyList(a), newKeyAdd(a), newKeyRevoke(a))
}

func newKeyList(a *app) *cobra.Command {
	o := listFlags{}
	var user string
	cmd := &cobra.Command{
		Use: "ls", Short: "List your keys", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.auth.ListDeviceKeys(cmd.Context(), connect.NewRequest(&carrelv1.ListDeviceKeysRequest{User: user}))
			if err != nil {
				return err
			}
			return writeList(a, keyList(api.dep.KeyID), each(resp.Msg.GetKeys(), viewKey), o)
		},
	}
	a.listFlags(cmd, &o)
	cmd.Flags().StringVar(&user, "user", "", "another's (admins)")
	return cmd
}

func keyList(own string) output.List[keyView] {
	type col = output.Column[keyView]
	return output.List[keyView]{
		Columns: []col{
			{Name: "id", Title: "ID", Text: func(k keyView) string { return k.ID }},
			{Name: "user", Title: "USER", Text: func(k keyView) string { return k.User }},
			{Name: "label", Title: "LABEL", Text: func(k keyView) string { return k.Label }},
			{Name: "fingerprint", Title: "FINGERPRINT", Text: func(k keyView) string { return k.Fingerprint }},
			{Name: "created_at", Title: "MADE", Text: func(k keyView) string { return k.CreatedAt.stamp() }, Value: func(k keyView) string { return k.CreatedAt.text() }},
			{Name: "public_key", Text: func(k keyView) string { return k.PublicKey }},
			{Title: "NOTE", Name: "note", Text: func(k keyView) string {
				if own != "" && k.ID == own {
					return "this machine's"
				}
				return ""
			}},
		},
		ID:    func(k keyView) string { return k.ID },
		Empty: "no keys",
	}
}

const maxKeyFile = 16 << 10 // bytes; an RSA key of 16,384 bits is a fifth of it

func newKeyAdd(a *app) *cobra.Command {
	var label string
	cmd := &cobra.Command{
		Use: "add FILE", Short: "Register another public key (a .pub file)", Args: exactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			line, comment, err := readPublicKey(args[0])
			if err != nil {
				return err
			}
			if label == "" {
				label = clipTo(comment, maxLabel)
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.auth.AddDeviceKey(cmd.Context(), connect.NewRequest(&carrelv1.AddDeviceKeyRequest{PublicKey: line, Label: label}))
			if err != nil {
				return err
			}
			k := viewKey(resp.Msg.GetKey())
			return a.print("%s  %s", k.ID, k.Fingerprint)
		},
	}
	cmd.Flags().StringVar(&label, "label", "", "what it is listed as (default: the key's comment)")
	return cmd
}

// readPublicKey reads a public key file; a private key is refused before anything is sent.
func readPublicKey(path string) (line, comment string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", "", usagef("%v", err)
	}
	if info.Size() > maxKeyFile {
		return "", "", usagef("%s is no public key file: it has %d bytes", path, info.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", "", usagef("%v", err)
	}
	if strings.Contains(string(b), "PRIVATE KEY") {
		return "", "", usagef("%s is a private key, which stays where it is; name the .pub file", path)
	}
	key, comment, _, _, err := ssh.ParseAuthorizedKey(b)
	if err != nil {
		return "", "", usagef("%s holds no public key in OpenSSH's form", path)
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), comment, nil
}

func newKeyRevoke(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "revoke ID", Short: "Take a key out of all workspaces and cut its connections; ID or fingerprint", Args: exactArgs("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			if _, err := api.auth.RevokeDeviceKey(cmd.Context(), connect.NewRequest(&carrelv1.RevokeDeviceKeyRequest{Id: args[0]})); err != nil {
				return err
			}
			return a.print("%s is revoked", args[0])
		},
	}
}
