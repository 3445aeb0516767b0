package command

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

const rootLong = `carrel gives you development containers on pooled GPUs: a workspace with a pinned image and a home that stays,
which VS Code, ssh and Jupyter attach to.

  carrel login LINK            sign in with the link that your admin gave you
  carrel up NAME --gpu 1       make a workspace, or start one that you have
  ssh NAME.carrel              work in it, with any ssh client
  carrel stop NAME             give the GPU back; your files stay`

// newRoot makes the whole command tree.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:           "carrel",
		Short:         "Development workspaces on pooled GPUs",
		Long:          rootLong,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return usagef("unknown command %q%s; see `carrel help`", args[0], suggestions(cmd, args[0]))
		},
	}
	root.PersistentFlags().StringVar(&a.flags.deployment, "deployment", "", "deployment to talk to, by its local name (CARREL_DEPLOYMENT)")
	root.PersistentFlags().StringVar(&a.flags.configDir, "config-dir", "", "directory of settings, tokens and keys (CARREL_CONFIG_DIR)")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%v; see `%s --help`", err, cmd.CommandPath())
	})
	root.AddCommand(
		newUp(a), newList(a), newShow(a), newStart(a), newStop(a), newRestart(a), newUpdate(a), newRemove(a), newLogs(a),
		newSSH(a), newExec(a), newSSHConfig(a), newProxy(a),
		newGPUs(a), newTop(a), newUsage(a), newRate(a),
		newPool(a), newImage(a), newVolume(a), newHost(a),
		newLogin(a), newLogout(a), newWhoAmI(a), newToken(a), newKey(a), newUser(a), newProject(a),
		newDeployment(a), newDoctor(a), newVersion(a),
	)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// group makes a command that only has others below it.
func group(use, short string, subs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs}
	cmd.AddCommand(subs...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var names []string
		for _, c := range cmd.Commands() {
			if !c.Hidden {
				names = append(names, c.Name())
			}
		}
		if len(args) == 0 {
			return usagef("%s: say what to do: %s", cmd.CommandPath(), strings.Join(names, ", "))
		}
		return usagef("%s: unknown command %q; there is %s", cmd.CommandPath(), args[0], strings.Join(names, ", "))
	}
	return cmd
}

func suggestions(cmd *cobra.Command, arg string) string {
	near := cmd.SuggestionsFor(arg)
	if len(near) == 0 {
		return ""
	}
	return fmt.Sprintf(", did you mean %s?", strings.Join(near, " or "))
}
